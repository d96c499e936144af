# SPDX-License-Identifier: Apache-2.0
"""Lists the tensors of a model's checkpoint, parameter by parameter.

Loading and saving both use this list: `load` packs the tensors of a `Part` into
a parameter, and `save` unpacks them.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax

from coat_jax.models.config import ModelConfig
from coat_jax.models.hf.config import AnyConfig
from coat_jax.models.hf.config_tables import CONFIGS
from coat_jax.models.hf.layouts import Row
from coat_jax.models.hf.tensor_tables import PREFIXES, PROJECTOR, TENSORS, Table
from coat_jax.models.params import is_stacked, matrix_split, path_of
from coat_jax.models.vision.config import VisionConfig
from coat_jax.models.vision_language import VisionLanguageConfig
from coat_jax.optimizer.matrices import MatrixSplit


class Part(NamedTuple):
  """One parameter, or one layer of a stacked parameter, and its tensors.

  Attributes:
    path: the parameter's path, such as `layers/mlp/gate_up/kernel`.
    layer: index of the layer; None for parameters that are not stacked.
    row: the parameter's row in the family's table.
    split: how it is cut into matrices; None if it is not cut.
    tensors: each tensor's shape, with the parameter's dtype, by tensor name.
  """

  path: str
  layer: int | None
  row: Row
  split: MatrixSplit | None
  tensors: dict[str, jax.ShapeDtypeStruct]


class Section(NamedTuple):
  """A whole model, or the tower, projector or decoder of a LLaVA.

  Attributes:
    path: prefix of its parameters' paths, such as "decoder/", or empty.
    prefix: prefix of its tensors' names.
    config: the section's configuration; None for the projector.
  """

  path: str
  prefix: str
  config: ModelConfig | VisionConfig | None

  @property
  def table(self) -> Table:
    """The family's table."""
    if self.config is None:
      return PROJECTOR
    table = TENSORS[self.config.family]
    return table(self.config) if callable(table) else table

  @property
  def optional(self) -> str:
    """The prefix of tensor names that only some checkpoints use."""
    return PREFIXES.get(self.config.family, "") if self.config else ""

  def spellings(self, name: str) -> tuple[str, ...]:
    """Lists the names under which checkpoints may store a tensor."""
    own = name.removeprefix(self.prefix)
    others = self.optional + own, own.removeprefix(self.optional)
    return (name, *(self.prefix + other for other in others))

  def foreign(self, names: Collection[str]) -> set[str]:
    """Selects the tensors of the text model in a full CLIP or SigLIP."""
    if self.config is None or CONFIGS[self.config.family].whole is None:
      return set()
    own = self.prefix + self.optional
    if not any(name.startswith(own) for name in names):
      return set()
    here = [name for name in names if name.startswith(self.prefix)]
    return {name for name in here if not name.startswith(own)}

  def parts(self, params: Any) -> Iterator[Part]:
    """Yields this section's parts, layer by layer; `params` are the model's."""
    table, config = self.table, self.config
    if self.path:
      params = params[self.path.rstrip("/")]
    leaves = {path_of(keys): x for keys, x in jax.tree.leaves_with_path(params)}
    assert leaves.keys() <= table.keys(), leaves.keys() - table.keys()
    found = {}
    for path, x in leaves.items():
      one = jax.ShapeDtypeStruct(x.shape[is_stacked(path) :], x.dtype)
      split = matrix_split(self.path + path, config)
      tensors = jax.eval_shape(lambda x: table[path].unpack(x, split), one)  # noqa: B023
      found[path] = split, tensors

    def part(path: str, layer: int | None = None) -> Part:
      split, tensors = found[path]
      experts = getattr(config, "num_experts", None)
      names = table[path].of_layer(layer or 0, experts)
      names = [self.prefix + name for name in names]
      named = dict(zip(names, tensors, strict=True))
      return Part(self.path + path, layer, table[path], split, named)

    stacked = [path for path in table if path in leaves and is_stacked(path)]
    if "embedding" in leaves:
      yield part("embedding")
    for i in range(config.num_layers if config else 0):
      yield from (part(path, i) for path in stacked)
    for path in table:
      if path in leaves and path not in stacked and path != "embedding":
        yield part(path)


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
  """Yields the parts of a model, layer by layer, from its parameters."""
  for section in sections(config):
    yield from section.parts(params)
