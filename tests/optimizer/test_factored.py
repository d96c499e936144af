# SPDX-License-Identifier: Apache-2.0
"""Tests optimizers whose second moments are factored."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

from coat_jax import coat_adamw, codecs, encoded
from coat_jax.codecs.factored import Factored
from coat_jax.optimizer import (
  from_plain_state,
  fused_coat_adamw,
  passes,
  state_bytes,
  state_report,
  step_in_backward,
  to_plain_state,
)
from coat_jax.optimizer import step as steps
from tests.codecs.oracles import rank_one_tiles
from tests.matrices import quick

CODEC = codecs.coat(second="factored")
EXACT = codecs.MomentCodec(name="exact", mu=codecs.float32().mu, nu=Factored())
# The axes of rows and columns are sharded. A device's shard of layers/w has
# whole tiles, and shards of layers/c and e split tiles. s is too short to be
# factored, because its first axis has 4 values.
LEAVES = {
  "layers/w": ((2, 1024, 512), P(None, "x", "y")),
  "layers/c": ((3, 128, 2, 512), P(None, "x", None, "y")),
  "e": ((96, 128), P(("x", "y"))),
  "s": ((4, 2048), P("x")),
  "norm": ((64,), P()),
}


def tree(seed, mesh=None):
  rng = np.random.default_rng(seed)

  def leaf(shape, spec):
    columns = np.exp(rng.normal(size=shape[-1]))
    x = jnp.asarray(rng.normal(size=shape) * columns, jnp.float32)
    return jax.device_put(x, NamedSharding(mesh, spec)) if mesh else x

  return {name: leaf(*where) for name, where in LEAVES.items()}


def make_mesh(kind=AxisType.Auto, shape=(4, 2)):
  return jax.make_mesh(shape, ("x", "y"), axis_types=(kind,) * 2)


def run(optimizer, mesh=None, steps=3, **kwargs):
  """Takes steps; returns (parameters, state)."""
  params = tree(0, mesh)
  state = jax.jit(optimizer.init)(params)
  for seed in range(1, steps + 1):
    params, state = step_of(optimizer)(params, state, tree(seed, mesh))
  return params, state


@functools.cache
def step_of(optimizer):
  def step(params, state, grads):
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return jax.jit(step)


def test_steps_match_numpy_adam_whose_second_moments_have_rank_one_tiles():
  b1, b2, rate, eps = 0.9, 0.95, 1e-2, 1e-8
  optimizer = coat_adamw(rate, b1, b2, eps, weight_decay=0.0, codec=EXACT)
  got, _ = run(optimizer, steps=5)
  for name, row, tiles in (
    ("layers/w", 1, 4),
    ("layers/c", 1, 1),
    ("e", 0, 1),
    ("s", None, None),
  ):
    p = np.asarray(tree(0)[name], float)
    m, v = np.zeros_like(p), np.zeros_like(p)
    for count in range(1, 6):
      g = np.asarray(tree(count)[name], float)
      m = b1 * m + (1 - b1) * g
      v = b2 * v + (1 - b2) * g**2
      if row is not None:
        v = rank_one_tiles(v, row, tiles)
      root = np.sqrt(v / (1 - b2**count))
      p = p - rate * m / (1 - b1**count) / (root + eps)
    np.testing.assert_allclose(got[name], p, rtol=1e-4, atol=1e-5)


def test_factored_state_takes_about_one_byte_per_parameter():
  params = {"w": jax.ShapeDtypeStruct((32, 4096, 2, 11008), "float32")}
  optimizer = coat_adamw(1e-3, codec=CODEC)
  size = state_bytes(jax.eval_shape(optimizer.init, params))
  assert size.bytes_per_param == pytest.approx(1 + (5 + 4) / 128 + 4 / 256)
  assert size.parameters == params["w"].size


def test_state_converts_to_optax_and_back():
  optimizer = coat_adamw(1e-2, codec=EXACT)
  _, state = run(optimizer)
  plain = to_plain_state(state)
  nu = plain[0].nu
  assert jax.tree.map(jnp.shape, nu) == jax.tree.map(jnp.shape, tree(0))
  again = from_plain_state(plain, jax.eval_shape(lambda: state))
  for a, b in zip(*map(jax.tree.leaves, (again, state)), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-6)
  with pytest.raises(ValueError, match="must have a moment for each parameter"):
    wrong = jax.tree.map(lambda x: x[:1] if x.ndim else x, plain)
    from_plain_state(wrong, state)


def test_encoded_optimizer_is_reported_and_refuses_other_shapes():
  optimizer = encoded(optax.scale_by_adam(), EXACT)
  state = jax.jit(optimizer.init)(tree(0))
  _, state = jax.jit(optimizer.update)(tree(1), state)
  report = state_report(state)
  assert report["e"]["parameters"] == 96 * 128
  assert report["e"]["nu"] == {"zeroed": 0.0}
  with pytest.raises(ValueError, match="gradients must have the shapes"):
    optimizer.update({**tree(1), "e": jnp.ones((96, 64))}, state)


@pytest.mark.parametrize("group_size", [64, 96, 256])
def test_gpu_step_matches_cpu_step_if_groups_and_tiles_differ(
  monkeypatch, group_size
):
  # 288 values are 3 groups of 96, and also 3 tiles of at most 128.
  shape = (256, 288 if group_size == 96 else 512)
  codec = codecs.coat(group_size, rounding="nearest", second="factored")
  rng = np.random.default_rng(0)
  grads = rng.normal(size=shape) * np.exp(rng.normal(size=shape[1]))
  params = {"w": jnp.asarray(grads, jnp.float32)}
  found = []
  for platform in ("cpu", "gpu"):
    monkeypatch.setattr(steps, "platform", lambda name=platform: name)
    jax.clear_caches()
    optimizer = fused_coat_adamw(1e-3, codec=codec)
    state = optimizer.init(params)
    assert state.nu.codes["w"].ndim == 0
    found.append(jax.jit(optimizer.apply)(params, state, params)[0]["w"])
  np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", quick(0, ["float32", "bfloat16"]))
def test_step_in_passes_matches_the_ordinary_step(monkeypatch, dtype):
  calls = []
  kept = passes.run_factored
  monkeypatch.setattr(
    passes, "run_factored", lambda *x: calls.append(x) or kept(*x)
  )
  found = {}
  for platform in ("cpu", "gpu"):
    monkeypatch.setattr(steps, "platform", lambda name=platform: name)
    jax.clear_caches()
    optimizer = fused_coat_adamw(1e-3, codec=CODEC)
    params = jax.tree.map(lambda x: x.astype(dtype), tree(0))
    state = optimizer.init(params)
    step = jax.jit(lambda p, s, g, o=optimizer: o.apply(g, s, p))
    for seed in (1, 2):
      params, state = step(params, state, tree(seed))
    found[platform] = params, to_plain_state(state)
    assert bool(calls) == (platform == "gpu")
  pairs = zip(*map(jax.tree.leaves, found.values()), strict=True)
  for a, b in pairs:
    a, b = (np.asarray(x, float) for x in (a, b))
    # A value at a rounding boundary may get the neighbouring code.
    is_near = np.isclose(a, b, rtol=1e-5, atol=1e-9)
    assert np.mean(is_near) > 0.999
    np.testing.assert_allclose(a, b, rtol=0.15, atol=1e-3)


def layer(params, x):
  return x + jnp.tanh(x @ params["up"]) @ params["down"]


def test_step_in_backward_matches_an_ordinary_step():
  rng = np.random.default_rng(0)
  params = {
    "in": jnp.asarray(0.1 * rng.normal(size=(40, 128)), jnp.float32),
    "layers": {
      "up": jnp.asarray(0.1 * rng.normal(size=(3, 128, 256)), jnp.float32),
      "down": jnp.asarray(0.1 * rng.normal(size=(3, 256, 128)), jnp.float32),
    },
  }
  inputs = jnp.asarray(rng.normal(size=(8, 40)), jnp.float32)
  optimizer = fused_coat_adamw(1e-2, codec=CODEC)

  def before(outer):
    return inputs @ outer["in"]

  def after(outer, x):
    return jnp.mean(jnp.square(x - 1))

  def loss(params):
    x = before(params)
    for i in range(3):
      x = layer(jax.tree.map(lambda w, i=i: w[i], params["layers"]), x)
    return after(params, x)

  @jax.jit
  def ordinary(params, state):
    return optimizer.apply(jax.grad(loss)(params), state, params)

  @jax.jit
  def in_backward(params, state):
    done = step_in_backward(
      optimizer, params, state, before=before, layer=layer, after=after
    )
    return done.params, done.state

  want = got = params, optimizer.init(params)
  for _ in range(5):
    want, got = ordinary(*want), in_backward(*got)
  for a, b in zip(*map(jax.tree.leaves, (got[0], want[0])), strict=True):
    # A moment at a rounding boundary may get the neighbouring code.
    assert np.mean(np.isclose(a, b, rtol=1e-3, atol=1e-3)) > 0.9999
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-2)
  nu = got[1].nu.amax["layers"]["up"], want[1].nu.amax["layers"]["up"]
  np.testing.assert_allclose(*nu, rtol=1e-3)
  assert loss(got[0]) < 0.9 * loss(params)


def test_step_in_backward_refuses_layers_that_share_a_factored_leaf():
  params = {"in": jnp.ones(64), "layers": {"w": jnp.ones((32, 64))}}
  optimizer = fused_coat_adamw(
    1e-2, codec=CODEC, quantize_mask=lambda path, leaf: leaf.ndim > 1
  )
  with pytest.raises(ValueError, match="all layers share"):
    step_in_backward(
      optimizer,
      params,
      optimizer.init(params),
      before=lambda outer: outer["in"],
      layer=lambda p, x: x * p["w"],
      after=lambda outer, x: jnp.sum(x),
    )


def test_vmapped_states_are_converted():
  params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 64)))}
  optimizer = coat_adamw(
    1e-2, codec=EXACT, quantize_mask=lambda path, leaf: True
  )
  state = jax.vmap(optimizer.init)(params)
  _, state = jax.vmap(optimizer.update)(params, state, params)
  nu = to_plain_state(state)[0].nu["w"]
  squares = np.square(np.asarray(params["w"], float))
  rows, columns = (squares.mean(i, keepdims=True) for i in (2, 1))
  want = 0.001 * rows * columns / rows.mean(1, keepdims=True)
  np.testing.assert_allclose(nu, want, rtol=1e-4)
  assert state_bytes(state).parameters == params["w"].size


def test_state_with_another_codec_of_second_moments_is_refused():
  params = {"w": jnp.ones((64, 128))}
  for own, other, said in (
    (codecs.coat(), CODEC, r"got a moment of Factored\(\)"),
    (CODEC, codecs.coat(), r"which stores Factored\(\), got a moment of Exp"),
  ):
    state = coat_adamw(1e-2, codec=other).init(params)
    with pytest.raises(ValueError, match=said):
      coat_adamw(1e-2, codec=own).update(params, state, params)
