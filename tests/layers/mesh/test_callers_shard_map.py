# SPDX-License-Identifier: Apache-2.0
"""Tests layers inside a `jax.shard_map` that the caller wrote.

Tokens are split, and weights are replicated, except over stages of a pipeline.
JAX tracks over which axes arrays differ. Weights do not differ over the axes
that split tokens, so their gradients must be summed over these axes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

from coat_jax import recipes
from coat_jax.layers import (
  Heads,
  MoEWeights,
  linear,
  moe,
  split_heads,
)
from coat_jax.layers.vocabulary import mean_loss
from tests.comparing import assert_close
from tests.layers.attention_output import attention_output
from tests.matrices import quick

COAT = recipes.coat()


def normal(seed, shape, dtype=jnp.float32):
  return jax.random.normal(jax.random.key(seed), shape, dtype)


def of_linear(w, x, recipe=COAT):
  return total(linear(x, w, recipe=recipe))


def of_attention(w, x, recipe=COAT):
  heads = split_heads(x, jnp.arange(16), Heads(2, 1, 1e4), recipe=recipe)
  return total(attention_output(x, *heads, w, recipe=recipe))


def of_experts(weights, x, recipe=COAT):
  y, _ = moe(
    x,
    MoEWeights(None, None, *weights),
    experts_per_token=2,
    normalize=False,
    kind=None,
    eps=1e-6,
    recipe=recipe,
  )
  return total(y)


def of_vocabulary(w, x):
  targets = jnp.zeros(x.shape[:2], jnp.int32)
  shares = jnp.full(x.shape[:2], 1 / 128)
  return mean_loss(x, targets, w, shares, is_tied=False, axes=None)


def total(y):
  return jnp.sum(y.astype(jnp.float32))


EXPERTS = [(64, 4), (4, 64, 2, 64), (4, 64, 64)]
FP8_ATTENTION = recipes.coat(attention="fp8")
CASES = {
  "linear": (of_linear, (64, 128)),
  "attention": (of_attention, (32, 64)),
  "fp8_attention": (
    functools.partial(of_attention, recipe=FP8_ATTENTION),
    (32, 64),
  ),
  "experts": (
    functools.partial(of_experts, recipe=recipes.bf16()),
    EXPERTS,
  ),
  "vocabulary": (of_vocabulary, (64, 128)),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_replicated_weights_are_summed_in_a_callers_shard_map(
  name: str,
):
  loss, shapes = CASES[name]
  check_sum_of_gradients(loss, loss, shapes)


@pytest.mark.parametrize(
  ("loss", "shapes"), [(of_linear, (64, 128)), (of_experts, EXPERTS)]
)
def test_layers_with_axes_sum_gradients_only_once(loss, shapes):
  axes = recipes.MeshAxes(batch=("data",), fsdp=None)
  with_axes = functools.partial(
    loss, recipe=dataclasses.replace(COAT, axes=axes)
  )
  check_sum_of_gradients(with_axes, loss, shapes)


@pytest.mark.parametrize("recipe", quick(1, [COAT, FP8_ATTENTION]))
def test_each_stage_of_a_pipeline_has_its_own_scales(recipe):
  mesh = jax.make_mesh(
    (2, 2),
    ("stage", "data"),
    axis_types=(AxisType.Auto,) * 2,
    devices=jax.devices()[:4],
  )
  axes = recipes.MeshAxes(batch=("data",), fsdp=None)
  with_axes = dataclasses.replace(recipe, axes=axes)
  # Inputs of one stage are a thousand times as large as those of the other.
  x = normal(0, (2, 4, 16, 64)) * jnp.array([1, 1e3]).reshape(2, 1, 1, 1)
  w = normal(1, (2, 32, 64)) / 8

  def gradients(recipe, w, x):
    return jax.grad(of_attention, (0, 1))(w, x, recipe)

  def stage(w, x):
    dw, dx = gradients(with_axes, w[0], x[0])
    return dw[None], dx[None]

  got = jax.jit(
    jax.shard_map(
      stage,
      mesh=mesh,
      in_specs=(P("stage"), P("stage", "data")),
      out_specs=(P("stage"), P("stage", "data")),
      check_vma=False,
    )
  )(w, x)
  one = jax.jit(functools.partial(gradients, recipe))
  for i in range(2):
    assert_close(jax.tree.map(lambda a, i=i: a[i], got), one(w[i], x[i]))


def check_sum_of_gradients(on_devices, whole, shapes):
  """Compares gradients on eight devices with gradients on one device."""
  x = normal(0, (8, 16, 64), jnp.bfloat16)
  w = jax.tree.map(lambda s: normal(1, s) / 8, shapes, is_leaf=is_shape)
  # Devices along the second axis have the same tokens.
  mesh = jax.make_mesh((4, 2), ("data", "copies"))
  gradients = jax.shard_map(
    jax.grad(on_devices), mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
  )
  got = jax.jit(gradients)(w, jax.device_put(x, NamedSharding(mesh, P("data"))))
  wanted = jax.jit(jax.grad(whole))(w, x)
  # Scales cover the rows of all devices (`collectives.scale_axes`), so codes
  # match. A different order of f32 sums changes a few roundings to BF16.
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b)


def is_shape(x):
  return isinstance(x, tuple)
