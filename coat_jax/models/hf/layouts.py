# SPDX-License-Identifier: Apache-2.0
"""Layouts: how the tensors of a checkpoint are arranged in a parameter."""

from collections.abc import Callable
from typing import Any, NamedTuple

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
  """Converts tensors to a parameter and back.

  Attributes:
    pack: `(config, *tensors) -> parameter`; only moves values.
    unpack: `(config, parameter) -> tensors`, the inverse of `pack`.
    is_transposed: whether the parameter's last axis is first in the tensors.
    is_of_experts: whether the parameter's first axis is experts, each with its
      own tensors.
  """

  pack: Callable[..., Any]
  unpack: Callable[[Any, Any], tuple]
  is_transposed: bool = True
  is_of_experts: bool = False

  def spec(self, spec: P) -> P:
    """Returns the tensors' sharding if the parameter is sharded by `spec`."""
    spec = P(*spec[1:]) if self.is_of_experts else spec
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
EXPERTS_GATE_UP = Layout(
  lambda _, *x: jnp.stack(list(map(pack_gate_up, x[::2], x[1::2]))),
  lambda _, x: tuple(y for each in x for y in unpack_gate_up(each)),
  is_of_experts=True,
)
EXPERTS_TRANSPOSED = Layout(
  lambda _, *x: jnp.stack([each.T for each in x]),
  lambda _, x: tuple(each.T for each in x),
  is_of_experts=True,
)
GATE_UP_OF_PHI = Layout(
  lambda _, x: pack_gate_up(*jnp.split(x, 2)),
  lambda _, gate_up: (jnp.concatenate(unpack_gate_up(gate_up)),),
)


def _split_rows(config: ModelConfig, qkv: Any) -> list:
  """Splits rows [(N + 2 K) H, D] into q, k and v."""
  n, k = config.num_heads, config.num_kv_heads
  width = qkv.shape[0] // (n + 2 * k)
  return jnp.split(qkv, [n * width, (n + k) * width])


# GPT-2's kernels are [inputs, outputs], like ours; q, k and v are in sequence.
QKV_OF_GPT2 = Layout(
  lambda config, qkv: pack_qkv(
    *jnp.split(qkv.T, 3), num_kv_heads=config.num_kv_heads
  ),
  lambda config, qkv: (
    jnp.concatenate(
      unpack_qkv(
        qkv, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads
      )
    ).T,
  ),
  is_transposed=False,
)


class Row(NamedTuple):
  """The tensors of a parameter.

  In a name, `{i}` stands for the layer's index and `{e}` for that of an expert.
  """

  layout: Layout
  names: tuple[str, ...]

  def of_layer(self, config: Any, i: int) -> list[str]:
    """Lists the tensors' names in layer `i`, expert by expert."""
    count = config.num_experts if self.layout.is_of_experts else 1
    return [
      name.format(i=i, e=e) for e in range(count or 1) for name in self.names
    ]
