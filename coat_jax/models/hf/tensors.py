# SPDX-License-Identifier: Apache-2.0
"""Lists each parameter's tensors, and converts between parameters and tensors.

A parameter may contain several matrices, such as those of q, k and v
(`MatrixSplit`). A checkpoint stores each matrix as a tensor, or concatenates
all matrices of the parameter into one tensor. Tensors are usually transposed,
as in PyTorch. Conversion only moves values, so it is exact in every dtype.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, P

from coat_jax.models.config import ModelConfig
from coat_jax.models.hf.config import AnyConfig
from coat_jax.models.hf.config_tables import CONFIGS
from coat_jax.models.hf.tensor_tables import (
  INPUTS_FIRST,
  PREFIXES,
  PROJECTOR,
  SHAPES,
  TENSORS,
  Table,
)
from coat_jax.models.params import is_stacked, matrix_split, parameter
from coat_jax.models.vision.config import VisionConfig
from coat_jax.models.vision_language import VisionLanguageConfig
from coat_jax.optimizer.masks import leaf_path
from coat_jax.optimizer.matrices import (
  MatrixSplit,
  join_matrices,
  split_matrices,
)

# The ends of tensors' names, by the last name in a parameter's path.
_ENDS = {"kernel": ".weight", "scale": ".weight", "bias": ".bias"}
_TRANSPOSED = ("matrix", "output", "router")


class Layout(NamedTuple):
  """How a checkpoint stores a parameter, or one layer of a stacked parameter.

  Attributes:
    names: one name per matrix, or one for all matrices; `{i}` and `{e}` stand
      for the layer and the expert, as in `tensor_tables`.
    is_transposed: whether tensors are [outputs, inputs], as in PyTorch.
    shape: the tensor's shape if it has more axes than the parameter; else None.
  """

  names: tuple[str, ...]
  is_transposed: bool = False
  shape: tuple[int, ...] | None = None

  @property
  def is_of_experts(self) -> bool:
    """Returns whether each expert has separate tensors."""
    return "{e}" in self.names[0]

  def spec(self, spec: P) -> P:
    """Converts a parameter's sharding to the sharding of its tensors."""
    spec = P(*spec[1:]) if self.is_of_experts else spec
    return P(spec[-1], spec[0]) if self.is_transposed else spec

  def pack(
    self,
    tensors: Sequence[Array],
    shape: tuple[int, ...],
    split: MatrixSplit | None,
  ) -> Array:
    """Makes a parameter of `shape` from its tensors."""
    if split is None:
      (x,) = tensors
      if self.is_transposed:
        return x.reshape(shape[::-1]).T
      return x.reshape(shape)
    if self.is_transposed:
      tensors = [x.T for x in tensors]
    if len(tensors) == 1:  # The tensor's columns may contain all matrices.
      widths = [split.groups * width for width in split.parts] or [shape[-1]]
      ends = np.cumsum(widths * (tensors[0].shape[-1] // sum(widths)))
      tensors = jnp.split(tensors[0], ends[:-1].tolist(), axis=-1)
    return join_matrices(tensors, split, shape)

  def unpack(self, x: Array, split: MatrixSplit | None) -> list[Array]:
    """Makes a parameter's tensors from the parameter x; inverts `pack`."""
    found = [x] if split is None else split_matrices(x, split)
    if len(self.names) == 1 and not self.is_of_experts:
      found = [jnp.concatenate(found, axis=-1)]
    if self.is_transposed:
      found = [x.T for x in found]
    return [x.reshape(self.shape or x.shape) for x in found]


class Part(NamedTuple):
  """One parameter, or one layer of a stacked parameter, and its tensors.

  `layer` is None if the parameter is not stacked. `split` is None if the
  parameter has no split (see `matrix_split`). `tensors` maps each tensor's name
  to its shape and the parameter's dtype.
  """

  path: str
  layer: int | None
  layout: Layout
  split: MatrixSplit | None
  tensors: dict[str, jax.ShapeDtypeStruct]


class Section(NamedTuple):
  """A whole model, or the tower, projector or decoder of a LLaVA model.

  The paths of its parameters start with `path`, such as "decoder/", and the
  names of its tensors start with `prefix`. The projector's `config` is None.
  """

  path: str
  prefix: str
  config: ModelConfig | VisionConfig | None

  @property
  def family(self) -> str | None:
    """The section's family; None for the projector."""
    return self.config and self.config.family

  @property
  def optional(self) -> str:
    """The prefix that only some checkpoints add to tensor names."""
    return PREFIXES.get(self.family or "", "")

  def spellings(self, name: str) -> tuple[str, ...]:
    """Lists the names under which checkpoints may store a tensor."""
    own = name.removeprefix(self.prefix)
    others = self.optional + own, own.removeprefix(self.optional)
    return (name, *(self.prefix + other for other in others))

  def foreign(self, names: Collection[str]) -> set[str]:
    """Selects the tensors to skip: in CLIP and SigLIP, those outside the tower.

    No tensors are skipped in other families, or if no tensor has the tower's
    prefix.
    """
    if self.family is None or CONFIGS[self.family].whole is None:
      return set()
    own = self.prefix + self.optional
    if not any(name.startswith(own) for name in names):
      return set()
    here = [name for name in names if name.startswith(self.prefix)]
    return {name for name in here if not name.startswith(own)}

  def layout(self, path: str) -> Layout:
    """Looks up how a parameter is stored; `path` is relative to the section."""
    found = TENSORS[self.family] if self.family else PROJECTOR
    table: Table = found(self.config) if callable(found) else found
    module, _, own = path.rpartition("/")
    names, end = table.get(path), ""
    if names is None:
      names, end = table[module], _ENDS[own]
    names = (names,) if isinstance(names, str) else names
    role = parameter(self.path + path).role
    is_transposed = role in _TRANSPOSED
    if role == "matrix" and self.family in INPUTS_FIRST:
      is_transposed = False
    shape = None
    if sizes := SHAPES.get(self.family or "", {}).get(path):
      shape = tuple(
        size if isinstance(size, int) else getattr(self.config, size)
        for size in sizes
      )
    names = tuple(self.prefix + name + end for name in names)
    return Layout(names, is_transposed, shape)

  def parts(self, params: Any) -> Iterator[Part]:
    """Yields the section's `Part`s, layer by layer; `params` is the model's."""
    config = self.config
    num_experts: Any = getattr(config, "num_experts", None)
    if self.path:
      params = params[self.path.rstrip("/")]
    found = {}
    for keys, x in jax.tree.leaves_with_path(params):
      path = leaf_path(keys)
      layout, split = self.layout(path), matrix_split(self.path + path, config)
      one = jax.ShapeDtypeStruct(x.shape[is_stacked(path) :], x.dtype)
      tensors = jax.eval_shape(lambda x: layout.unpack(x, split), one)  # noqa: B023
      found[path] = layout, split, tensors

    def part(path: str, layer: int | None = None) -> Part:
      layout, split, tensors = found[path]
      experts = num_experts if layout.is_of_experts else 1
      names = [
        name.format(i=layer, e=e)
        for e in range(experts)
        for name in layout.names
      ]
      named = dict(zip(names, tensors, strict=True))
      return Part(self.path + path, layer, layout, split, named)

    stacked = [path for path in found if is_stacked(path)]
    for i in range(config.num_layers if config else 0):
      yield from (part(path, i) for path in stacked)
    yield from (part(path) for path in found if path not in stacked)


def sections(config: AnyConfig) -> tuple[Section, ...]:
  """Returns the sections of a model."""
  if not isinstance(config, VisionLanguageConfig):
    return (Section("", "", config),)
  return (
    Section("tower/", "vision_tower.", config.vision),
    Section("projector/", "multi_modal_projector.", None),
    Section("decoder/", "language_model.", config.text),
  )


def parts(config: AnyConfig, params: Any) -> Iterator[Part]:
  """Yields the `Part`s of a model, layer by layer, from its parameters."""
  for section in sections(config):
    yield from section.parts(params)
