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
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, P
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from coat_jax.checks import check_float_dtype, check_kind
from coat_jax.layers.module import recipe_of
from coat_jax.models import specs
from coat_jax.models.config import ModelConfig
from coat_jax.models.decoder import Decoder
from coat_jax.models.hf.config import CONFIG, read_config
from coat_jax.models.hf.files import (
  StoredTensor,
  open_tensors,
  split_experts,
)
from coat_jax.models.hf.llava_config import read_llava_config
from coat_jax.models.hf.tensors import (
  IGNORED_ENDS,
  PREFIXES,
  TENSORS,
  AnyConfig,
  Section,
  is_stacked,
  parts,
  path_of,
  sections,
)
from coat_jax.models.hf.vision_config import read_vision_config
from coat_jax.models.hf.vision_tensors import of_tower
from coat_jax.models.stack import Store, stored_in
from coat_jax.models.vision import VisionConfig, VisionTower
from coat_jax.models.vision_language import VisionLanguageModel
from coat_jax.recipe import CoatRecipe

# The functions that read config.json.
_READ: dict[type, Callable[[Path], tuple[AnyConfig, np.dtype]]] = {
  Decoder: read_config,
  VisionTower: read_vision_config,
  VisionLanguageModel: read_llava_config,
}
# The number of rows of two tensors that are compared at a time.
_ROWS = 4096


@overload
def load_hf(
  folder: str | Path,
  *,
  model: type[Decoder] = ...,
  recipe: CoatRecipe | None = None,
  mesh: Mesh | None = None,
  dtype: DTypeLike = ...,
  param_dtype: DTypeLike = ...,
) -> Decoder: ...
@overload
def load_hf[Model: (VisionTower, VisionLanguageModel)](
  folder: str | Path,
  *,
  model: type[Model],
  recipe: CoatRecipe | None = None,
  mesh: Mesh | None = None,
  dtype: DTypeLike = ...,
  param_dtype: DTypeLike = ...,
) -> Model: ...


def load_hf(
  folder: str | Path,
  *,
  model: type[Any] = Decoder,
  recipe: CoatRecipe | None = None,
  mesh: Mesh | None = None,
  dtype: DTypeLike = jnp.bfloat16,
  param_dtype: DTypeLike = jnp.float32,
) -> Any:
  """Loads a model that `save_pretrained` of transformers wrote.

  Example usage::

    from coat_jax import recipe
    from coat_jax.models import load_hf

    model = load_hf("Llama-2-7b-hf", recipe=recipe.coat())
    model.logits(tokens)  # f32 [B, T, V]

  Args:
    folder: a folder with config.json and model.safetensors, or with shards and
      their index.
    model: `Decoder`; `VisionTower`, also for a CLIP or SigLIP that includes a
      text model; or `VisionLanguageModel`, for LLaVA.
    recipe: what layers compute and save in FP8; None for `recipe.coat()`. On a
      mesh it gets the mesh's axes unless it has some.
    mesh: a mesh with axes data, fsdp and tensor, over which parameters are
      sharded by `param_shardings`; call the model under `jax.set_mesh`. None
      for one device.
    dtype: dtype of activations.
    param_dtype: dtype in which weights are stored: float32, which represents
      all values of the others, bfloat16 or float16. Norms' scales and biases
      are always f32.

  Returns:
    A model of that class with these weights.

  Raises:
    TypeError: `model` is none of these classes; an argument of another kind.
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
  recipe = _on_mesh(recipe_of(op, recipe), mesh)

  if (read := _READ.get(model) if isinstance(model, type) else None) is None:
    names = ", ".join(kind.__name__ for kind in _READ)
    raise TypeError(
      f"load_hf: model must be one of the classes {names}, got {model!r}; pass "
      "the class, as in model=VisionTower"
    )
  store = stored_in("load_hf", param_dtype)
  config, _ = read(folder)
  how: dict[str, Any] = dict(recipe=recipe, dtype=dtype, store=store)
  make = functools.partial(model, config, **how)
  abstract = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(params=0)))
  graph, abstract = nnx.split(abstract, nnx.Param)
  abstract = nnx.to_pure_dict(abstract)
  if mesh is not None:
    where = specs.param_shardings(mesh, abstract)
    abstract = jax.tree.map(lambda x, y: x.update(sharding=y), abstract, where)
  return nnx.merge(graph, load_params(folder, config, abstract, store))


def _on_mesh(recipe: CoatRecipe, mesh: Mesh | None) -> CoatRecipe:
  if mesh is None or recipe.axes is not None:
    return recipe
  return dataclasses.replace(recipe, axes=specs.mesh_axes(mesh.shape))


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

  Returns:
    The same tree of arrays, with the shardings of `abstract` and the dtypes
    that `store` returns.

  Raises:
    ValueError: the checkpoint's tensors are not those of the model, or one
      holds NaN, infinity or values too large for the dtypes of `store`.
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
  """Opens a checkpoint and checks that its tensors fit a model.

  Args:
    folder: the checkpoint's folder.
    config: the model's shape.
    params: its parameters, nested dicts of arrays or `jax.ShapeDtypeStruct`.

  Returns:
    The tensors by name.

  Raises:
    ValueError: tensors are missing or surplus, or have other shapes.
  """
  tensors = open_tensors(folder)
  for section in sections(config):
    tensors = _named(section, tensors)
  wanted: dict[str, tuple[int, ...]] = {}
  for part in parts(config, params):
    wanted |= {name: x.shape for name, x in part.tensors.items()}
  where = f"load_hf: {folder} must have the tensors of its {CONFIG}"
  if missing := [name for name in wanted if name not in tensors]:
    raise ValueError(
      f"{where}, got no {_some(missing)}; copy the whole checkpoint"
    )
  for name, shape in wanted.items():
    if tensors[name].shape != shape:
      raise ValueError(
        f"{where}, got {name} {list(tensors[name].shape)} in place of "
        f"{list(shape)}; pass a folder whose files belong together"
      )
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
    raise ValueError(
      f"{where}, got {_some(surplus)} too, which this model does not have; "
      "pass a folder whose files belong together"
    )
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
  row, config = section.table[path], section.config
  own = where = leaf.sharding
  if where is not None:
    entries = P(*where.spec, *(None,) * (leaf.ndim - len(where.spec)))
    entries = entries[1:] if is_stacked(path) else entries
    own = NamedSharding(where.mesh, row.layout.spec(P(*entries)))

  def packed(*found):
    x = store(row.layout.pack(config, *found).astype(jnp.float32))
    return x, jnp.all(jnp.isfinite(x))

  def of_layer(i: int) -> list[StoredTensor]:
    names = row.of_layer(config, i)
    return [tensors[section.prefix + name] for name in names]

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
  stack = None
  assert config is not None  # Sections without a config are never stacked.
  for i in range(config.num_layers):
    found = place(of_layer(i))
    if stack is None:
      dtype = jax.eval_shape(packed, *found)[0].dtype
      stack = jnp.zeros(leaf.shape, dtype, device=where)
    stack, is_finite = update(stack, np.int32(i), *found)
    # This waits, or layers would pile up on the host.
    _check_finite(is_finite, of_layer(i), stack.dtype)
  assert stack is not None  # There is at least one layer.
  return stack


def _check_finite(
  is_finite: Array, stored: list[StoredTensor], dtype: np.dtype
) -> None:
  """Raises ValueError if a parameter is not finite, once it is computed.

  Args:
    is_finite: bool, whether the parameter is.
    stored: the tensors that it was made of.
    dtype: of the parameter.
  """
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
