# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts with a loss, for tests on meshes."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from coat_jax.layers import MoE, load_balancing_loss, with_weight_cache

D, F, K = 64, 96, 2


def build(recipe, num_experts, dtype=jnp.float32):
  """Returns a loss-and-gradient function and the initial parameters."""

  def make(recipe):
    options = dict(normalize=True, norm="layer", use_norm_bias=True)
    options |= dict(dtype=dtype, recipe=recipe, rngs=nnx.Rngs(0))
    return MoE(D, F, num_experts, K, **options)

  graph = nnx.split(nnx.eval_shape(lambda: make(recipe)), nnx.Param)[0]
  single = dataclasses.replace(recipe, axes=None)
  params = nnx.to_pure_dict(nnx.split(make(single), nnx.Param)[1])

  def loss(params, x, dy):
    y, stats = with_weight_cache(nnx.merge(graph, params))(x)
    return jnp.sum(y * dy) + 3 * load_balancing_loss(stats), (y, stats)

  return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), params
