# SPDX-License-Identifier: Apache-2.0
"""Which backend computes attention in a run, said before it starts.

cuDNN has kernels for some heads and lengths alone, and for FP8 no windows, soft
caps or segments; all else is right on any backend, but slow through XLA.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from coat_jax import ops
from coat_jax.formats import E4M3
from coat_jax.models.config import ModelConfig
from coat_jax.models.vision import VisionConfig
from coat_jax.models.vision_language import VisionLanguageConfig
from coat_jax.qtensor import QTensor
from train.config import TrainConfig

EVERYWHERE = "xla everywhere"
_PREFIX = "attention_fp8_fwd: "


def explain_fp8(
  config: TrainConfig, *, has_segments: bool, mesh: Mesh | None = None
) -> dict[str, str]:
  """Says what computes attention whose products read FP8.

  Args:
    config: The run, with its checkpoint's shape.
    has_segments: Whether its batches have documents that do not see each other.
    mesh: Its devices; None for one.

  Returns:
    By part of the model what `ops.explain` says; {} where products read BF16.
  """
  recipe = config.coat_recipe()
  if recipe.attention_compute != "fp8":
    return {}
  found = {}
  for part, tokens, heads, segmented, kinds in _parts(config, has_segments):
    said = [
      f"{EVERYWHERE} (--implementation xla)"
      if recipe.implementation == "xla"
      else _explain(tokens, heads, segmented, kind, mesh)
      for kind in kinds
    ]
    # Of layers of several kinds, one that is slow decides.
    slow = [x for x in said if x.startswith(EVERYWHERE)]
    found[part] = (slow or said)[0]
  return found


def describe_fp8(
  config: TrainConfig, *, has_segments: bool, mesh: Mesh | None = None
) -> list[str]:
  """As `explain_fp8`, a line for each part, to print."""
  return [
    f"{config.out}: attention in FP8, {part}: {said}"
    + ("; slow on a GPU" if said.startswith(EVERYWHERE) else "")
    for part, said in explain_fp8(
      config, has_segments=has_segments, mesh=mesh
    ).items()
  ]


# Its name, tokens, heads as (queries, keys, width), whether it has segments,
# and the kinds of its layers.
type _Part = tuple[
  str, int, tuple[int, int, int], bool, list[ops.AttentionKind]
]


def _parts(config: TrainConfig, has_segments: bool) -> Iterator[_Part]:
  """Yields the parts of a model that attend."""
  # Subclasses have other shapes.
  shape: ModelConfig | VisionConfig | VisionLanguageConfig = config.model
  text = tower = None
  if isinstance(shape, VisionLanguageConfig):
    text, tower = shape.text, shape.vision
  elif isinstance(shape, VisionConfig):
    tower = shape
  else:
    text = shape
  if tower is not None:
    heads = tower.num_heads, tower.num_heads, tower.d_model // tower.num_heads
    kinds = [ops.AttentionKind(causal=False)]
    yield "vision tower", tower.num_tokens, heads, False, kinds
  if text is not None:
    heads = text.num_heads, text.num_kv_heads, text.head_width
    windows = (
      text.windows if isinstance(text.windows, tuple) else [text.windows]
    )
    kinds = [
      ops.AttentionKind(window=window, soft_cap=text.attention_soft_cap)
      for window in windows
    ]
    yield "decoder", config.seq, heads, has_segments, kinds


def _explain(
  tokens: int,
  heads: tuple[int, int, int],
  has_segments: bool,
  kind: ops.AttentionKind,
  mesh: Mesh | None,
) -> str:
  queries, keys, width = heads

  def codes(count: int) -> QTensor:
    shape = 1, tokens, count, width
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    return QTensor(jax.ShapeDtypeStruct(shape, E4M3), scale)  # pyright: ignore[reportArgumentType]

  q, k = codes(queries), codes(keys)
  segments = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
  arrays = q, k, k, segments if has_segments else None
  said = []

  def ask(x):
    said.append(ops.explain(ops.attention_fp8_fwd, *arrays, kind=kind))
    return x

  if mesh is not None:  # As layers call it there.
    whole = PartitionSpec()
    shard_map = functools.partial(jax.shard_map, in_specs=whole)
    ask = shard_map(ask, mesh=mesh, out_specs=whole)
  jax.eval_shape(ask, jax.ShapeDtypeStruct((), jnp.float32))
  return said[0].removeprefix(_PREFIX)
