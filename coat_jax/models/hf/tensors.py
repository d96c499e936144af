# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a checkpoint make which parameter, family by family.

A row names the tensors of one parameter, of one layer where layers are stacked,
and how they are laid out in it. Families whose tensors have other names, or are
fused otherwise, are other tables.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import P

from coat_jax.models.config import ModelConfig
from coat_jax.models.hf.pack import (
  pack_gate_up,
  pack_qkv,
  unpack_gate_up,
  unpack_qkv,
)


class Layout(NamedTuple):
  """How tensors are laid out in a parameter.

  Attributes:
    pack: `(config, *tensors) -> parameter`; moves values, and no more.
    unpack: `(config, parameter) -> tensors`, its inverse.
    is_transposed: whether tensors have the parameter's last axis first.
  """

  pack: Callable[..., Any]
  unpack: Callable[[ModelConfig, Any], tuple]
  is_transposed: bool = True

  def spec(self, spec: P) -> P:
    """How tensors are sharded if the parameter is sharded by `spec`."""
    if self.is_transposed and len(spec) > 1:
      return P(spec[-1], spec[0])
    return spec


SAME = Layout(lambda _, x: x, lambda _, x: (x,), is_transposed=False)
TRANSPOSED = Layout(lambda _, x: x.T, lambda _, x: (x.T,))
QKV = Layout(
  lambda config, *qkv: pack_qkv(*qkv, num_kv_heads=config.num_kv_heads),
  lambda config, qkv: unpack_qkv(
    qkv, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads
  ),
)
GATE_UP = Layout(
  lambda _, gate, up: pack_gate_up(gate, up),
  lambda _, gate_up: unpack_gate_up(gate_up),
)


QKV_OF_PHI = Layout(
  lambda config, qkv: pack_qkv(
    *_split_rows(config, qkv), num_kv_heads=config.num_kv_heads
  ),
  lambda config, qkv: (
    jnp.concatenate(
      unpack_qkv(
        qkv, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads
      )
    ),
  ),
)
GATE_UP_OF_PHI = Layout(
  lambda _, x: pack_gate_up(*jnp.split(x, 2)),
  lambda _, gate_up: (jnp.concatenate(unpack_gate_up(gate_up)),),
)


def _split_rows(config: ModelConfig, qkv: Any) -> list:
  """q, k and v of their rows [(N + 2 K) H, D]."""
  n, k = config.num_heads, config.num_kv_heads
  width = qkv.shape[0] // (n + 2 * k)
  return jnp.split(qkv, [n * width, (n + k) * width])


class Row(NamedTuple):
  """The tensors of a parameter; `{i}` in a name is the layer's number."""

  layout: Layout
  names: tuple[str, ...]

  def of_layer(self, i: int) -> list[str]:
    """The tensors' names in layer `i`."""
    return [name.format(i=i) for name in self.names]


_LAYER = "model.layers.{i}."
_LLAMA = {
  "embedding": Row(SAME, ("model.embed_tokens.weight",)),
  "layers/attention/qkv/norm/scale": Row(
    SAME, (_LAYER + "input_layernorm.weight",)
  ),
  "layers/attention/qkv/linear/kernel": Row(
    QKV, tuple(f"{_LAYER}self_attn.{x}_proj.weight" for x in "qkv")
  ),
  "layers/attention/qkv/linear/bias": Row(
    QKV, tuple(f"{_LAYER}self_attn.{x}_proj.bias" for x in "qkv")
  ),
  "layers/attention/out/kernel": Row(
    TRANSPOSED, (_LAYER + "self_attn.o_proj.weight",)
  ),
  "layers/mlp/norm/scale": Row(
    SAME, (_LAYER + "post_attention_layernorm.weight",)
  ),
  "layers/mlp/gate_up/kernel": Row(
    GATE_UP, tuple(f"{_LAYER}mlp.{x}_proj.weight" for x in ("gate", "up"))
  ),
  "layers/mlp/down/kernel": Row(TRANSPOSED, (_LAYER + "mlp.down_proj.weight",)),
  "norm/scale": Row(SAME, ("model.norm.weight",)),
  "head": Row(TRANSPOSED, ("lm_head.weight",)),
}
_NORMS_OF_QK = {
  f"layers/attention/{x}_norm/scale": Row(
    SAME, (f"{_LAYER}self_attn.{x}_norm.weight",)
  )
  for x in "qk"
}
# Behind its blocks, where others have them in front.
_OLMO2 = {
  path: row for path, row in _LLAMA.items() if not path.endswith("/norm/scale")
} | {
  "layers/attention/post_norm/scale": Row(
    SAME, (_LAYER + "post_attention_layernorm.weight",)
  ),
  "layers/mlp/post_norm/scale": Row(
    SAME, (_LAYER + "post_feedforward_layernorm.weight",)
  ),
  "norm/scale": _LLAMA["norm/scale"],
}
_PHI = _LLAMA | {
  "layers/attention/qkv/linear/kernel": Row(
    QKV_OF_PHI, (_LAYER + "self_attn.qkv_proj.weight",)
  ),
  "layers/mlp/gate_up/kernel": Row(
    GATE_UP_OF_PHI, (_LAYER + "mlp.gate_up_proj.weight",)
  ),
}
# By the family's name; a model has those rows whose parameters it has.
TENSORS: dict[str, dict[str, Row]] = {
  "llama": _LLAMA,
  "olmo": _LLAMA,
  "qwen2": _LLAMA,
  "mistral": _LLAMA,
  "qwen3": _LLAMA | _NORMS_OF_QK,
  "olmo2": _OLMO2 | _NORMS_OF_QK,
  "phi3": _PHI,
}

# Old checkpoints of Llama hold the frequencies of RoPE, which follow from its
# base.
IGNORED_ENDS = ("rotary_emb.inv_freq",)


class Part(NamedTuple):
  """What of a model comes from one row: a parameter, or one layer of it.

  Attributes:
    path: the parameter's, `layers/mlp/gate_up/kernel`.
    layer: number of the layer; None of parameters that are not stacked.
    row: of the parameter.
    tensors: name, and shape and dtype of the parameter's, of each tensor.
  """

  path: str
  layer: int | None
  row: Row
  tensors: dict[str, jax.ShapeDtypeStruct]


def path_of(keys: Any) -> str:
  """Writes the keys that lead to a parameter as tables have them."""
  return jax.tree_util.keystr(keys, simple=True, separator="/")


def is_stacked(path: str) -> bool:
  """Whether a parameter has a leading axis of layers."""
  return path.startswith("layers/")


def parts(config: ModelConfig, params: Any) -> Iterator[Part]:
  """Yields what a model is made of, in the order of its layers.

  Args:
    config: the model's.
    params: its parameters, nested dicts of arrays or `jax.ShapeDtypeStruct`.
  """
  table = TENSORS[config.family]
  leaves = {path_of(keys): x for keys, x in jax.tree.leaves_with_path(params)}
  assert leaves.keys() <= table.keys(), leaves.keys() - table.keys()
  tensors = {
    path: _shapes(config, table[path], x.shape[is_stacked(path) :], x.dtype)
    for path, x in leaves.items()
  }

  def part(path: str, layer: int | None = None) -> Part:
    names = table[path].of_layer(layer or 0)
    named = dict(zip(names, tensors[path], strict=True))
    return Part(path, layer, table[path], named)

  stacked = [path for path in table if path in leaves and is_stacked(path)]
  yield part("embedding")
  for i in range(config.num_layers):
    yield from (part(path, i) for path in stacked)
  for path in table:
    if path in leaves and path not in stacked and path != "embedding":
      yield part(path)


def _shapes(config: ModelConfig, row: Row, shape, dtype) -> tuple:
  """Shapes and dtypes of a row's tensors, from its parameter's in one layer."""
  one = jax.ShapeDtypeStruct(shape, dtype)
  return jax.eval_shape(lambda x: row.layout.unpack(config, x), one)
