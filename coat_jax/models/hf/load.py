# SPDX-License-Identifier: Apache-2.0
"""Loads safetensors checkpoints into parameters, straight onto their devices.

The host holds one tensor of one layer at a time, and only the part that its own
devices need. A tensor is moved as it is stored, sharded like the parameter. The
devices then transpose, pack and cast it into one layer of the stacked
parameter, which is updated in place.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, P
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from coat_jax.layers.module import recipe_of
from coat_jax.models.config import ModelConfig
from coat_jax.models.decoder import Decoder
from coat_jax.models.hf.config import AnyConfig, read_config
from coat_jax.models.hf.files import (
  StoredTensor,
  open_tensors,
  split_experts,
)
from coat_jax.models.hf.keys import CONFIG
from coat_jax.models.hf.tensors import (
  IGNORED_ENDS,
  PREFIXES,
  TENSORS,
  Section,
  parts,
  sections,
)
from coat_jax.models.hf.vision_tensors import of_tower
from coat_jax.models.params import (
  is_stacked,
  mesh_axes,
  param_shardings,
  path_of,
)
from coat_jax.models.stack import Store, stored_in
from coat_jax.models.vision.config import VisionConfig
from coat_jax.models.vision.tower import VisionTower
from coat_jax.models.vision_language import (
  VisionLanguageConfig,
  VisionLanguageModel,
)
from coat_jax.numerics.checks import check_float_dtype, check_kind
from coat_jax.numerics.recipes import CoatRecipe

Model = Decoder | VisionTower | VisionLanguageModel
# The number of rows of two tensors that are compared at a time.
_ROWS = 4096


def load_hf(
  folder: str | Path,
  *,
  recipe: CoatRecipe | None = None,
  mesh: Mesh | None = None,
  dtype: DTypeLike = jnp.bfloat16,
  param_dtype: DTypeLike = jnp.float32,
) -> Any:
  """Loads a model that `save_pretrained` of transformers wrote.

  Its config.json decides the class: a `Decoder`, a `VisionTower` (also for a
  CLIP or SigLIP that includes a text model) or, for LLaVA, a
  `VisionLanguageModel`.

  Example usage::

    from coat_jax.numerics import recipes
    from coat_jax.models import load_hf

    model = load_hf("Llama-2-7b-hf", recipe=recipes.coat())
    model.logits(tokens)  # f32 [B, T, V]

  Args:
    folder: a folder with config.json and model.safetensors, or with shards and
      their index.
    recipe: what layers compute and save in FP8; None for `recipes.coat()`. On a
      mesh it gets the mesh's axes unless it has some.
    mesh: a mesh with axes data, fsdp and tensor, over which parameters are
      sharded by `param_shardings`; call the model under `jax.set_mesh`. None
      for one device.
    dtype: dtype of activations.
    param_dtype: dtype in which weights are stored: float32, which represents
      all values of the others, bfloat16 or float16. Norms' scales and biases
      are always f32.

  Returns:
    The model with these weights.

  Raises:
    TypeError: an argument of another kind.
    ValueError: the folder has no such checkpoint, its model is not supported,
      or its weights are not finite; the message states what was found. Or
      `param_dtype` is none of these three.
  """
  op = "load_hf"
  check_kind(op, "folder", folder, (str, os.PathLike), "pass a path")
  if mesh is not None:
    check_kind(op, "mesh", mesh, Mesh, "make one with jax.make_mesh")
  check_float_dtype(op, "dtype", dtype)
  folder = Path(folder)
  recipe = recipe_of(op, recipe)
  if mesh is not None and recipe.axes is None:
    recipe = dataclasses.replace(recipe, axes=mesh_axes(mesh.shape))
  store = stored_in("load_hf", param_dtype)
  config, _ = read_config(folder)
  abstract = nnx.eval_shape(
    lambda: model_of(config, recipe=recipe, dtype=dtype, store=store)
  )
  graph, abstract = nnx.split(abstract, nnx.Param)
  abstract = nnx.to_pure_dict(abstract)
  if mesh is not None:
    where = param_shardings(mesh, abstract)
    abstract = jax.tree.map(lambda x, y: x.update(sharding=y), abstract, where)
  return nnx.merge(graph, load_params(folder, config, abstract, store))


def model_of(config: AnyConfig, **options: Any) -> Model:
  """Makes a model with random weights; its configuration decides the class."""
  kinds: dict[type, Any] = {
    ModelConfig: Decoder,
    VisionConfig: VisionTower,
    VisionLanguageConfig: VisionLanguageModel,
  }
  return kinds[type(config)](config, **options, rngs=nnx.Rngs(params=0))


def load_params(
  folder: Path,
  config: AnyConfig,
  abstract: Any,
  store: Store | None = None,
) -> Any:
  """Loads the parameters of a checkpoint.

  Args:
    folder: the checkpoint's folder.
    config: the model's shape.
    abstract: its parameters, nested dicts of `jax.ShapeDtypeStruct`; those
      without a sharding go to the default device.
    store: `(path, array) -> array`, as `Decoder` takes it; None casts to the
      dtypes of `abstract`.
  """
  tensors = check_tensors(folder, config, abstract)

  def load(section, keys, leaf):
    path = path_of(keys)
    cast = store or (lambda _, x: x.astype(leaf.dtype))
    return _load_leaf(
      section, path, leaf, tensors, lambda x: cast(section.path + path, x)
    )

  found = {
    section.path: jax.tree.map_with_path(
      functools.partial(load, section), section.params(abstract)
    )
    for section in sections(config)
  }
  if "" in found:
    return found[""]
  return {path.rstrip("/"): params for path, params in found.items()}


def check_tensors(
  folder: Path, config: AnyConfig, params: Any
) -> dict[str, StoredTensor]:
  """Opens a checkpoint; raises ValueError if its tensors do not fit."""
  tensors = open_tensors(folder)
  for section in sections(config):
    tensors = _named(section, tensors)
  wanted: dict[str, tuple[int, ...]] = {}
  for part in parts(config, params):
    wanted |= {name: x.shape for name, x in part.tensors.items()}
  where = f"load_hf: {folder} must have the tensors of its {CONFIG}"
  remedy = "pass a folder whose files belong together"
  if missing := [name for name in wanted if name not in tensors]:
    raise ValueError(
      f"{where}, got no {_some(missing)}; copy the whole checkpoint"
    )
  for name, shape in wanted.items():
    if (own := tensors[name].shape) != shape:
      got = f"{name} {list(own)} in place of {list(shape)}"
      raise ValueError(f"{where}, got {got}; {remedy}")
  surplus = [
    name
    for name in tensors
    if name not in wanted and not name.endswith(IGNORED_ENDS)
  ]
  for section in sections(config):
    text = section.config
    if isinstance(text, ModelConfig) and text.tied_embeddings:
      surplus = _without_tied_head(where, surplus, section, tensors)
  if surplus:
    got = f"{_some(surplus)} too, which this model does not have"
    raise ValueError(f"{where}, got {got}; {remedy}")
  return tensors


def _named(
  section: Section, tensors: dict[str, StoredTensor]
) -> dict[str, StoredTensor]:
  """Renames a section's tensors as its table names them; keeps all others."""
  prefix, config = section.prefix, section.config
  own = {
    name.removeprefix(prefix): x
    for name, x in tensors.items()
    if name.startswith(prefix)
  }
  others = {k: x for k, x in tensors.items() if not k.startswith(prefix)}
  if isinstance(config, VisionConfig):
    own = of_tower(config, own)
  elif config is not None:
    own = split_experts(_with_prefix(own, PREFIXES.get(config.family)))
  return others | {prefix + name: x for name, x in own.items()}


def _with_prefix(
  tensors: dict[str, StoredTensor], prefix: str | None
) -> dict[str, StoredTensor]:
  """Adds a prefix to all names but the head's, if no name has the prefix."""
  if prefix is None or any(name.startswith(prefix) for name in tensors):
    return tensors
  (head,) = TENSORS["llama"]["head"].names
  return {
    name if name == head else prefix + name: x for name, x in tensors.items()
  }


def _some(names: list[str]) -> str:
  more = f" and {len(names) - 2} others" if len(names) > 2 else ""
  return ", ".join(names[:2]) + more


def _without_tied_head(
  where: str,
  surplus: list[str],
  section: Section,
  tensors: Mapping[str, StoredTensor],
) -> list[str]:
  """Drops an output projection that repeats the embedding."""
  head, embedding = (
    section.prefix + section.table[path].names[0]
    for path in ("head", "embedding")
  )
  if head not in surplus:
    return surplus
  first, second = tensors[head], tensors[embedding]
  starts = range(0, first.shape[0], _ROWS) if first.shape else ()
  if first.shape != second.shape or not all(
    np.array_equal(first.read(rows), second.read(rows), equal_nan=True)
    for rows in (slice(start, start + _ROWS) for start in starts)
  ):
    raise ValueError(
      f"{where}, got another {head} than {embedding} though "
      "tie_word_embeddings is true; correct the one that is wrong"
    )
  return [name for name in surplus if name != head]


def _load_leaf(
  section: Section,
  path: str,
  leaf: jax.ShapeDtypeStruct,
  tensors: Mapping[str, StoredTensor],
  store: Callable[[Array], Array],
) -> Array:
  """Loads one parameter, for all layers if it is stacked."""
  row, split = section.table[path], section.split(path)
  shape = leaf.shape[is_stacked(path) :]
  own = where = leaf.sharding
  if where is not None:
    entries = P(*where.spec, *(None,) * (leaf.ndim - len(where.spec)))
    entries = entries[1:] if is_stacked(path) else entries
    own = NamedSharding(where.mesh, row.spec(P(*entries)))

  def packed(*found):
    x = store(row.pack(found, shape, split).astype(jnp.float32))
    return x, jnp.all(jnp.isfinite(x))

  def of_layer(i: int) -> list[StoredTensor]:
    return [tensors[name] for name in section.names(path, i)]

  def place(found: list[StoredTensor]) -> list[Array]:
    return [_place(tensor, own) for tensor in found]

  if not is_stacked(path):
    whole = jax.jit(packed, out_shardings=(where, None))
    x, is_finite = whole(*place(of_layer(0)))
    _check_finite(is_finite, of_layer(0), x.dtype)
    return x

  def update(stack, i, *found):
    x, is_finite = packed(*found)
    return jax.lax.dynamic_update_index_in_dim(stack, x, i, 0), is_finite

  update = jax.jit(update, donate_argnums=0, out_shardings=(where, None))
  dtype = jax.eval_shape(packed, *of_layer(0))[0].dtype
  stack = jnp.zeros(leaf.shape, dtype, device=where)
  for i in range(leaf.shape[0]):
    stack, is_finite = update(stack, np.int32(i), *place(of_layer(i)))
    # This waits, or layers would pile up on the host.
    _check_finite(is_finite, of_layer(i), dtype)
  return stack


def _check_finite(
  is_finite: Array, stored: list[StoredTensor], dtype: np.dtype
) -> None:
  """Raises ValueError if a parameter made of `stored` is not finite."""
  if is_finite:
    return
  for tensor in stored:
    if not np.all(np.isfinite(tensor.read())):
      raise ValueError(
        f"load_hf: {tensor.file} must hold finite weights, got NaN or infinity "
        f"in {tensor.name}; the model had diverged when it was saved, or the "
        "file is damaged: use another checkpoint, or copy the file again"
      )
  names = ", ".join(tensor.name for tensor in stored)
  raise ValueError(
    f"load_hf: param_dtype must hold the largest weights, got {dtype}, in "
    f"which some of {names} are infinite; pass float32"
  )


def _place(tensor: StoredTensor, sharding: NamedSharding | None) -> Array:
  """Moves a tensor to its devices; each one reads only its own part."""
  if sharding is None:
    return jnp.asarray(tensor.read())
  return jax.make_array_from_callback(tensor.shape, sharding, tensor.read)
