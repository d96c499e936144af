# SPDX-License-Identifier: Apache-2.0
"""Tests attention with most of its options, on meshes of eight devices."""

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType

from coat_jax import recipes
from coat_jax.layers import Attention
from tests.layers.mesh.test_rule import B, D, T, check
from tests.matrices import quick

ROWS = jnp.arange(B, dtype=jnp.int32)[:, None]
PLACES = jnp.arange(T, dtype=jnp.int32)[None]
# The length of documents differs between sequences.
POSITIONS, SEGMENTS = PLACES % (3 + ROWS), PLACES // (3 + ROWS)


class Packed(nnx.Module):
  """Attention with positions, packed documents and two kinds of layers."""

  def __init__(self, recipe, qk_norm):
    self.attention = Attention(
      D,
      4,
      num_kv_heads=2,
      qk_norm=qk_norm,
      window=(4, None),
      rope_theta=(1e4, 1e2),
      rotary_dim=8,
      soft_cap=5.0,
      query_scale=0.3,
      use_qkv_bias=True,
      recipe=recipe,
      dtype=jnp.float32,
      rngs=nnx.Rngs(0),
    )

  def __call__(self, x):
    return self.attention(x, POSITIONS, SEGMENTS, jnp.int32(1))


@pytest.mark.parametrize(
  "recipe, qk_norm, sizes, kind",
  quick(
    1,
    [
      (recipes.coat(), "all", (2, 2, 2), AxisType.Auto),
      (recipes.coat(), "head", (2, 2, 2), AxisType.Auto),
      (recipes.coat(attention="fp8"), "all", (1, 8, 1), AxisType.Auto),
      (recipes.coat(), "head", (1, 8, 1), AxisType.Explicit),
      (recipes.coat(), "all", (2, 2, 2), AxisType.Explicit),
      (recipes.coat(), None, (2, 2, 2), AxisType.Auto),
      (recipes.fp8_linear(), "all", (2, 2, 2), AxisType.Auto),
      (recipes.bf16(), "head", (2, 2, 2), AxisType.Auto),
    ],
  ),
)
def test_attention_on_a_mesh_matches_one_device(recipe, qk_norm, sizes, kind):
  check(lambda r: Packed(r, qk_norm), recipe, sizes, kind)
