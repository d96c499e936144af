# SPDX-License-Identifier: Apache-2.0
"""Loads safetensors checkpoints straight onto the devices of their parameters.

For one parameter of one layer at a time, the host reads the tensors, but only
the shards for its own devices. The tensors move to the devices in the
checkpoint's dtype, sharded like the parameter. The devices then transpose, pack
and cast the tensors, and write the result into the stacked parameter in place.
"""

import dataclasses
import os
from collections.abc import Mapping
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
from coat_jax.models.hf.files import StoredTensor, open_tensors, split_experts
from coat_jax.models.hf.keys import CONFIG
from coat_jax.models.hf.tensor_tables import IGNORED_ENDS
from coat_jax.models.hf.tensors import Part, Section, parts, sections
from coat_jax.models.initialization import Store, stored_in
from coat_jax.models.params import is_stacked, mesh_axes, param_shardings
from coat_jax.models.vision.config import VisionConfig
from coat_jax.models.vision.tower import VisionTower
from coat_jax.models.vision_language import (
  VisionLanguageConfig,
  VisionLanguageModel,
)
from coat_jax.numerics.checks import check_float_dtype, check_kind
from coat_jax.optimizer.masks import leaf_path
from coat_jax.recipes import CoatRecipe

Model = Decoder | VisionTower | VisionLanguageModel
_ROWS = 4096  # How many rows of two tensors are compared at a time.


def load_hf(
  folder: str | Path,
  *,
  recipe: CoatRecipe | None = None,
  mesh: Mesh | None = None,
  dtype: DTypeLike = jnp.bfloat16,
  param_dtype: DTypeLike = jnp.float32,
) -> Any:
  """Loads a model that transformers' `save_pretrained` wrote.

  config.json determines the class: `Decoder`, `VisionTower` or, for LLaVA,
  `VisionLanguageModel`. If a CLIP or SigLIP checkpoint includes a text model,
  only the vision tower is loaded.

  Example usage::

    from coat_jax import recipes
    from coat_jax.models import load_hf

    model = load_hf("Llama-2-7b-hf", recipe=recipes.coat())
    model.logits(tokens)  # f32 [B, T, V]

  Args:
    folder: a folder with config.json and either model.safetensors or shards
      with their index.
    recipe: what layers compute and save in FP8; None for `recipes.coat()`. If
      the recipe's `axes` are None, the axes of the mesh are used.
    mesh: a mesh with automatic axes data, fsdp, tensor and possibly expert.
      Call the model under `jax.set_mesh`. None for one device.
    dtype: dtype of activations.
    param_dtype: dtype of the loaded weights: bfloat16, float16 or float32.
      Biases, the scales of norms, and a tower's class token and pooling query
      (`probe`) are always f32.

  Returns:
    The model with the checkpoint's weights.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: the folder contains no complete checkpoint, a weight is not
      finite, or the model, `mesh` or `param_dtype` is not supported.
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
  store = stored_in(op, param_dtype)
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
  """Makes a model with random weights; `config` determines its class."""
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
  """Loads a checkpoint's parameters, with the tree and shardings of `abstract`.

  `store` is as for `Decoder`; None casts parameters to the dtypes in
  `abstract`.
  """
  tensors = check_tensors(folder, config, abstract)
  leaves = {leaf_path(k): x for k, x in jax.tree.leaves_with_path(abstract)}
  loading: dict[str, _Parameter] = {}
  for part in parts(config, abstract):
    if part.path not in loading:
      loading[part.path] = _Parameter(part, leaves[part.path], store)
    stored = [tensors[name] for name in part.tensors]
    loading[part.path].load(part.layer, stored)
  return jax.tree.map_with_path(
    lambda keys, _: loading[leaf_path(keys)].array, abstract
  )


def check_tensors(
  folder: Path, config: AnyConfig, params: Any
) -> dict[str, StoredTensor]:
  """Returns the stored tensors; raises ValueError unless they fit the model."""
  stored = split_experts(open_tensors(folder))
  where = f"load_hf: {folder} must have the tensors that its {CONFIG} describes"
  remedy = "pass a folder whose files belong together"
  wanted: dict[str, tuple[int, ...]] = {}
  found: dict[str, StoredTensor] = {}
  foreign: set[str] = set()
  for section in sections(config):
    foreign |= section.foreign(stored)
    for part in section.parts(params):
      for name, x in part.tensors.items():
        wanted[name] = x.shape
        for spelling in section.spellings(name):
          if spelling in stored:
            found[name] = stored.pop(spelling)
            break
  if missing := [name for name in wanted if name not in found]:
    raise ValueError(
      f"{where}, got no {_some(missing)}; copy the whole checkpoint"
    )
  for name, shape in wanted.items():
    if (own := found[name].shape) != shape:
      got = f"{name} {list(own)} instead of {list(shape)}"
      raise ValueError(f"{where}, got {got}; {remedy}")
  for section in sections(config):
    text = section.config
    if isinstance(text, ModelConfig) and text.tied_embeddings:
      _drop_tied_head(where, section, stored, found)
  surplus = [
    name
    for name in stored
    if name not in foreign and not name.endswith(IGNORED_ENDS)
  ]
  if surplus:
    got = f"{_some(surplus)} too, which this model does not have"
    raise ValueError(f"{where}, got {got}; {remedy}")
  return found


def _some(names: list[str]) -> str:
  """Lists the first two names, and counts the others."""
  more = f" and {len(names) - 2} more" if len(names) > 2 else ""
  return ", ".join(names[:2]) + more


def _drop_tied_head(
  where: str,
  section: Section,
  stored: dict[str, StoredTensor],
  found: Mapping[str, StoredTensor],
) -> None:
  """Drops a stored output projection, which must be equal to the embedding."""
  head, embedding = (
    section.layout(path).names[0] for path in ("head", "embedding")
  )
  if head not in stored:
    return
  first, second = stored.pop(head), found[embedding]
  starts = range(0, first.shape[0], _ROWS) if first.shape else ()
  if first.shape != second.shape or not all(
    np.array_equal(first.read(rows), second.read(rows), equal_nan=True)
    for rows in (slice(start, start + _ROWS) for start in starts)
  ):
    raise ValueError(
      f"{where}, got different {head} and {embedding} though "
      "tie_word_embeddings is true; set it to false if both were trained"
    )


class _Parameter:
  """Loads a parameter, layer by layer if its layers are stacked."""

  def __init__(
    self, part: Part, leaf: jax.ShapeDtypeStruct, store: Store | None
  ):
    """Prepares the conversion; `part` may be any layer of the parameter."""
    # The first axis of a stacked parameter is the axis of layers.
    first = 1 if is_stacked(part.path) else 0
    shape, where = leaf.shape[first:], leaf.sharding
    self.sharding = None
    if where is not None:
      axes = (*where.spec, *(None,) * (leaf.ndim - len(where.spec)))
      spec = part.layout.spec(P(*axes[first:]))
      self.sharding = NamedSharding(where.mesh, spec)

    def update(stack, layer, *tensors):
      x = part.layout.pack(tensors, shape, part.split).astype(jnp.float32)
      x = store(part.path, x) if store else x.astype(leaf.dtype)
      is_finite = jnp.all(jnp.isfinite(x))
      if stack is not None:
        x = jax.lax.dynamic_update_index_in_dim(stack, x, layer, 0)
      return x, is_finite

    self.update = jax.jit(update, out_shardings=(where, None), donate_argnums=0)
    tensors = part.tensors.values()
    self.dtype = jax.eval_shape(update, None, None, *tensors)[0].dtype
    self.array: Any = None
    if part.layer is not None:
      self.array = jnp.zeros(leaf.shape, self.dtype, device=where)

  def load(self, layer: int | None, stored: list[StoredTensor]) -> None:
    """Loads one layer, or a parameter that is not stacked."""
    tensors = [_place(tensor, self.sharding) for tensor in stored]
    i = None if layer is None else np.int32(layer)
    self.array, is_finite = self.update(self.array, i, *tensors)
    # Reading `is_finite` waits for the devices, so that the host never holds
    # the tensors of several layers.
    if not is_finite:
      raise _not_finite(stored, self.dtype)


def _not_finite(stored: list[StoredTensor], dtype: np.dtype) -> ValueError:
  """Makes the error for a parameter that is not finite in `dtype`."""
  for tensor in stored:
    if not np.all(np.isfinite(tensor.read())):
      return ValueError(
        f"load_hf: {tensor.file} must hold finite weights, got NaN or infinity "
        f"in {tensor.name}; the model had diverged when it was saved, or the "
        "file is damaged: use another checkpoint, or copy the file again"
      )
  names = ", ".join(tensor.name for tensor in stored)
  return ValueError(
    f"load_hf: param_dtype must hold the largest weights, got {dtype}, in "
    f"which some of {names} are infinite; pass float32"
  )


def _place(tensor: StoredTensor, sharding: NamedSharding | None) -> Array:
  """Moves a tensor to its devices; reads only the shards for this host."""
  if sharding is None:
    return jnp.asarray(tensor.read())
  return jax.make_array_from_callback(tensor.shape, sharding, tensor.read)
