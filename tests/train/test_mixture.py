# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts train on meshes and with recomputation.

tests/models/test_mixture.py tests their loss and gradients on one device.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax.models import loss_fn, param_shardings
from coat_jax.models.config import ModelConfig
from tests.comparing import assert_close, assert_same_bits, jit
from tests.train import steps
from tests.train.steps import TOKENS, Trained, on
from train import mesh as meshes
from train import step

pytestmark = pytest.mark.slow

MODEL = ModelConfig(
  family="qwen3_moe",
  num_layers=2,
  d_model=64,
  # With tensor=2, a device has 64 columns, which is one group of moments.
  d_ff=128,
  num_heads=4,
  num_kv_heads=2,
  vocab_size=384,
  num_experts=6,
  experts_per_token=2,
  auxiliary_loss=0.1,
)
EXACT = dataclasses.replace(steps.EXACT, model=MODEL)
SMALL = dataclasses.replace(steps.SMALL, model=MODEL)


def gradients(config, **options):
  """Returns the loss and its gradients at random weights."""
  config = dataclasses.replace(config, **options)
  graph = step.build_graph(config)
  abstract = step.abstract_state(config, step.build_optimizer(config)).params
  random = np.random.default_rng(1)
  params = jax.tree.map(
    lambda x: jnp.asarray(random.normal(0, 0.1, x.shape), x.dtype), abstract
  )

  def loss(params):
    return loss_fn(nnx.merge(graph, params), jnp.asarray(TOKENS))

  mesh = meshes.make_mesh(config.mesh_sizes)
  if mesh is None:
    return jit(jax.value_and_grad(loss))(params)
  with jax.set_mesh(mesh):
    params = jax.device_put(params, param_shardings(mesh, params))
    return jit(jax.value_and_grad(loss))(params)


@functools.cache
def on_one_device(is_exact):
  return gradients(EXACT if is_exact else SMALL)


def test_gradients_on_meshes_equal_those_on_one_device():
  want = on_one_device(True)
  for mesh in ("fsdp=8", "data=2,fsdp=2,tensor=2"):
    assert_close(gradients(EXACT, mesh=mesh), want, 1e-5)
  want = on_one_device(False)
  loss, found = gradients(SMALL, mesh="data=2,fsdp=2,tensor=2")
  # BF16 values are summed in a different order, which changes some codes.
  assert abs(loss - want[0]) < 1e-3
  for a, b in zip(
    jax.tree.leaves(found), jax.tree.leaves(want[1]), strict=True
  ):
    cosine = jnp.vdot(a, b) / jnp.linalg.norm(a) / jnp.linalg.norm(b)
    assert cosine > 0.99


def test_steps_with_optimizer_in_backward_equal_ordinary_steps():
  optim = dataclasses.replace(SMALL.optim, clip="share", grad_clip=1e9)
  config = on(SMALL, "fsdp=8", optim=optim)
  ordinary = Trained(config).run()
  assert ordinary.losses[0] - ordinary.losses[-1] > 0.1
  other = Trained(on(config, "fsdp=8", optimizer_in_backward=True)).run()
  assert ordinary.losses == other.losses
  assert_same_bits(ordinary.state.params, other.state.params)
  assert_same_bits(ordinary.state.optimizer, other.state.optimizer)
  experts = other.state.params["layers"]["mlp"]
  for x in (experts["gate_up"], experts["down"]):
    assert x.addressable_shards[0].data.size == x.size // 8


def test_only_fp8_layer_remat_changes_the_loss():
  want = on_one_device(True)
  for remat in ("dots", "full"):
    assert_close(gradients(EXACT, remat=remat), want, 1e-5)
  want = on_one_device(False)
  assert_same_bits(gradients(SMALL, remat="fp8"), want)
  # "fp8_layer" rounds the residual stream once per layer, so some tokens go to
  # other experts.
  loss, found = gradients(SMALL, remat="fp8_layer")
  assert 0 < abs(loss - want[0]) < 1e-2
  assert_close(found["head"], want[1]["head"], 0.2)
