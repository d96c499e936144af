# SPDX-License-Identifier: Apache-2.0
"""Compares `coat_muon` with `optax.contrib.muon`, and tests its FP8 state."""

import contextlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

from coat_jax import coat_muon, codecs, recipes, scale_by_coat_muon
from coat_jax.models import (
  Decoder,
  ModelConfig,
  model_matrices,
  param_shardings,
)
from coat_jax.optimizer import (
  MatrixSplit,
  from_plain_state,
  hidden_matrices,
  state_bytes,
  state_shardings,
  to_plain_state,
)
from tests.comparing import assert_close, assert_same_bits

HEADS = dict(num_heads=4, num_kv_heads=2)
MODEL = ModelConfig(
  family="llama", num_layers=2, d_model=64, d_ff=160, vocab_size=384, **HEADS
)
MATRICES = model_matrices(MODEL)


def abstract_params():
  model = nnx.eval_shape(
    lambda: Decoder(MODEL, recipes.coat(), rngs=nnx.Rngs(0))
  )
  return nnx.to_pure_dict(nnx.split(model, nnx.Param)[1])


def tree(seed, scale=0.02):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: jnp.asarray(scale * rng.normal(size=x.shape), jnp.float32),
    abstract_params(),
  )


def run(solver, trees):
  """Takes steps; returns (parameters, state, text of the compiled step)."""
  params, *grads = trees
  state = solver.init(params)

  def step(params, state, grads):
    updates, state = solver.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  # The step is compiled for one sharding of the state, which it must keep.
  step = jax.jit(step).lower(params, state, grads[0]).compile()
  for g in grads:
    params, state = step(params, state, g)
  return params, state, step.as_text()


def apart(params):
  """Separates all matrices, as `optax.contrib.muon` needs them."""
  out = {}
  for name in ("embedding", "head"):
    out[name] = params[name][None]  # Optax uses AdamW for arrays of three axes.
  out["norm"] = params["norm"]["scale"]
  layers = params["layers"]
  for i in range(2):
    # Columns are ordered by key head: each has two heads of q, one of k and one
    # of v.
    qkv = layers["attention"]["qkv"]["linear"]["kernel"][i]
    heads = qkv.reshape(64, 2, 4, 16)
    out[str(i)] = {
      "q": heads[:, :, :2].reshape(64, 64),
      "k": heads[:, :, 2].reshape(64, 32),
      "v": heads[:, :, 3].reshape(64, 32),
      "out": layers["attention"]["out"]["kernel"][i],
      "gate": layers["mlp"]["gate_up"]["kernel"][i, :, 0],
      "up": layers["mlp"]["gate_up"]["kernel"][i, :, 1],
      "down": layers["mlp"]["down"]["kernel"][i],
      "norms": [
        layers["attention"]["qkv"]["norm"]["scale"][i],
        layers["mlp"]["norm"]["scale"][i],
      ],
    }
  return out


@pytest.mark.parametrize(
  "options",
  [
    # Fewer Newton-Schulz steps compile faster. eps affects the result, because
    # it is as large as norms of matrices and roots of nu.
    dict(ns_steps=2, eps=0.05),
    pytest.param(
      dict(
        nesterov=False,
        consistent_rms=0.2,
        ns_coeffs=(3.0, -3.2, 1.2),
        adam_learning_rate=1e-3,
        adam_weight_decay=0.2,
        adam_b2=0.9,
      ),
      marks=pytest.mark.slow,
    ),
  ],
)
def test_float32_codec_matches_optax_muon_on_separate_matrices(options):
  options = dict(learning_rate=2e-2, weight_decay=0.1, beta=0.9) | options
  trees = [tree(0, 1.0), tree(1), tree(2)]
  solver = coat_muon(**options, matrices=MATRICES, codec=codecs.float32())
  got, *_ = run(solver, trees)
  want, *_ = run(
    optax.contrib.muon(**options), [apart(params) for params in trees]
  )
  # Weights are about 1, and each update is about 0.1.
  for x, y in zip(
    jax.tree.leaves(apart(got)), jax.tree.leaves(want), strict=True
  ):
    np.testing.assert_allclose(x, y, atol=1e-5, rtol=0)


def test_state_converts_to_optax_and_back():
  params, grads = (
    {"w": 0.1 * x, "u": x.T, "norm": x[0], "conv": x[None]}
    for x in jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 64)))
  )
  # Both states contain the counts of schedules, but only optax's contains
  # Newton-Schulz coefficients.
  options: dict = dict(
    learning_rate=optax.linear_schedule(0.02, 0.01, 9),
    ns_coeffs=(3.0, -3.2, 1.2),
    ns_steps=1,
    weight_decay=0.1,
  )
  codec, theirs = codecs.float32(), optax.contrib.muon(**options)
  ours = coat_muon(**options, codec=codec)
  _, state = ours.update(grads, ours.init(params), params)
  _, want = theirs.update(grads, theirs.init(params), params)
  plain = to_plain_state(state, ns_coeffs=options["ns_coeffs"])
  # Optax's chain has one more part, which has no state.
  got = jax.tree.unflatten(jax.tree.structure(want), jax.tree.leaves(plain))
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert x.dtype == y.dtype and x.shape == y.shape
    np.testing.assert_allclose(x, y, rtol=2**-22)  # Two roundings may differ.
  # The next updates, which are about 0.02, match.
  updates = [
    solver.update(params, state, params)[0]
    for solver, state in ((ours, state), (theirs, got))
  ]
  for x, y in zip(*map(jax.tree.leaves, updates), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-6, rtol=0)
  like = jax.eval_shape(ours.init, params)
  back = from_plain_state(
    jax.tree.unflatten(jax.tree.structure(plain), jax.tree.leaves(got)),
    like,
  )
  assert jax.tree.structure(back) == jax.tree.structure(state)
  assert_same_bits(back, state)


def test_momentum_and_adam_moments_use_different_words():
  # Both optimizers number their leaves from 0, and both moments are equal, so
  # only the random words can differ.
  grads = jnp.asarray(np.random.default_rng(0).normal(size=(64, 128)), "f4")
  params = {"up": grads, "embedding": grads}
  solver = coat_muon(1e-2, beta=0.9, adam_b1=0.9, ns_steps=1)
  _, state = jax.jit(solver.update)(params, solver.init(params), params)
  muon, adam = (
    next(
      np.asarray(x).view("u1").astype(int)
      for x in jax.tree.leaves(state.inner_states[name].inner_state[0].mu.codes)
    )
    for name in ("muon", "adam")
  )
  # Codes may be equal where a value is close to a code.
  assert 0.1 < np.mean(muon != adam) < 0.6
  assert np.max(np.abs(muon - adam)) == 1


def test_muon_and_adam_states_have_the_expected_sizes():
  params = {
    "layers": {
      "attention": {"qkv": {"linear": {"kernel": (32, 4096, 12288)}}},
      "mlp": {"gate_up": {"kernel": (32, 4096, 2, 11008)}},
    },
    "head": (4096, 32000),
  }
  params = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x, jnp.float32),
    params,
    is_leaf=lambda x: isinstance(x, tuple),
  )
  config = ModelConfig(
    family="llama",
    num_layers=32,
    d_model=4096,
    d_ff=11008,
    num_heads=32,
    num_kv_heads=32,
    vocab_size=32000,
  )
  matrices = model_matrices(config)
  state = jax.eval_shape(coat_muon(1e-2, matrices=matrices).init, params)
  of = {
    name: state_bytes(state.inner_states[name]) for name in ("muon", "adam")
  }
  assert of["muon"].bytes_per_param <= 1.05 < 2.07 < of["adam"].bytes_per_param
  assert of["adam"].parameters == 4096 * 32000
  # Without the numbers of heads, q, k and v cannot be separated.
  with pytest.raises(ValueError, match="models.model_matrices.model.con"):
    coat_muon(1e-2).init(abstract_params())


def leaf(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def test_hidden_matrices_exclude_tables_norms_and_convolutions():
  found = {
    "blocks/0/up": leaf(64, 128),
    "embedding": leaf(384, 64),
    "lm_head/kernel": leaf(64, 384),
    "moe/router": leaf(64, 8),
    "norm/scale": leaf(2, 64),
    "conv": leaf(3, 3, 8, 8),
    "rotation": leaf(8, 8, dtype=jnp.complex64),
  }
  chosen = [path for path, x in found.items() if hidden_matrices(path, x)]
  assert chosen == ["blocks/0/up"]


@pytest.mark.parametrize(
  "split, problem",
  [
    (MatrixSplit((0,), (0,)), "must name different axes"),
    (MatrixSplit((2,), (1,)), "must name different axes"),
    (MatrixSplit(parts=(-8, 16)), "must add up to 8 columns, got 1 times"),
    (MatrixSplit(groups=3), "must add up to 8 columns, got 3 times"),
    (MatrixSplit(groups=0), "must add up to 8 columns, got 0 times"),
    (MatrixSplit((-1,), (-2,)), "last output must be the leaf's last"),
    (MatrixSplit(parts=(3, 4)), "must add up to 8 columns, got 1 times"),
    (None, "leaves must be matrices"),
  ],
)
def test_wrong_splits_are_refused(split, problem):
  params = {"w": jnp.ones((4, 8))}
  solver = scale_by_coat_muon(matrices=lambda path, leaf: split)
  with pytest.raises(ValueError, match=problem):
    solver.update(params, solver.init(params))


def test_matrices_must_return_a_split():
  params = {"w": jnp.ones((4, 8)), "norm": jnp.ones(8)}
  muon, scale = map(inspect.unwrap, (coat_muon, scale_by_coat_muon))
  with pytest.raises(TypeError, match=r"coat_muon: .* True for \[8\] at 'no"):
    muon(1e-2, matrices=lambda path, leaf: True).init(params)
  solver = scale(matrices=lambda path, leaf: (0, 1))
  with pytest.raises(TypeError, match=r"got \(0, 1\) for .* MatrixSplit\(\) f"):
    solver.update(params, solver.init(params))
  params = {"w": jnp.ones((4, 8), "complex64")}
  solver = scale(matrices=lambda path, leaf: MatrixSplit())
  with pytest.raises(ValueError, match="be real, got complex64 at 'w'; return"):
    solver.update(params, solver.init(params))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_steps_on_a_mesh_match_one_device_and_gather_no_matrix(kind):
  axes = ("data", "fsdp", "tensor")
  mesh = jax.make_mesh((1, 8, 1), axes, axis_types=(kind,) * 3)
  trees = [{"layers": tree(seed)["layers"]} for seed in range(3)]
  where = param_shardings(mesh, trees[0])
  options = dict(ns_steps=3, matrices=MATRICES)
  want, want_state, _ = run(coat_muon(2e-2, **options), trees)
  known = where if kind == AxisType.Auto else None
  solver = coat_muon(2e-2, **options, shardings=known)
  with jax.set_mesh(mesh):
    placed = [jax.device_put(x, where) for x in trees]
    # Jit `init`, so that it places no array on a single device.
    predicted = state_shardings(solver.init, trees[0], where)
    init = jax.jit(solver.init, out_shardings=predicted)
    got, state, text = run(solver._replace(init=init), placed)
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    # Updates are 0.02 * 0.1. f32 rounding errors of sums over devices are
    # amplified up to 40 times if singular values are small.
    np.testing.assert_allclose(x, y, atol=2e-6, rtol=0)
  codes = [
    jax.tree.leaves(x.inner_states["muon"].inner_state[0].mu.codes)
    for x in (state, want_state)
  ]
  for x, y in zip(*codes, strict=True):
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
  for x, y in zip(
    jax.tree.leaves(state), jax.tree.leaves(predicted), strict=True
  ):
    assert x.sharding.is_equivalent_to(y, x.ndim)
  # Devices exchange parts of matrices and sum x x^T, but gather no matrix.
  assert "all-to-all" in text and "all-gather" not in text


def test_injected_hyperparameters_reach_muon():
  rng = np.random.default_rng(0)
  params, grads = (
    {"w": jnp.float32(rng.normal(size=(8, 12))), "norm": jnp.ones(8)}
    for _ in range(2)
  )
  solver = optax.inject_hyperparams(coat_muon)(0.02, codec=codecs.float32())
  state = solver.init(params)
  update = jax.jit(solver.update)
  for rate, steps in ((0.02, 5), (0.04, 3)):
    state.hyperparams["learning_rate"] = jnp.float32(rate)
    state.hyperparams["ns_steps"] = jnp.int32(steps)
    theirs = optax.contrib.muon(rate, ns_steps=steps)
    want, _ = theirs.update(grads, theirs.init(params), params)
    assert_close(update(grads, state, params)[0], want)


@pytest.mark.parametrize("is_set", [True, False])
def test_explicit_axes_work_with_injected_hyperparameters(is_set):
  w = jax.random.normal(jax.random.key(0), (384, 128))
  mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
  options = dict(consistent_rms=0.2)

  def first_update(solver, w):
    params = {"w": w}
    state = solver.init(params)
    return jax.jit(solver.update)(params, state, params)[0]["w"]

  want = first_update(coat_muon(1e-2, **options), w)
  w = jax.device_put(w, jax.NamedSharding(mesh, jax.P("x")))
  injected = optax.inject_hyperparams(coat_muon)(1e-2, **options)
  with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
    # `optax.inject_hyperparams` itself needs the mesh to be set.
    solver = injected if is_set else coat_muon(1e-2, **options)
    got = first_update(solver, w)
  np.testing.assert_allclose(got, want, atol=1e-6, rtol=0)
