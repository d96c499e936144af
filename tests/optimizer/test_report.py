# SPDX-License-Identifier: Apache-2.0
"""Tests reports on the size of states and on the errors of moments."""

import doctest
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import P
from jax.sharding import AxisType, NamedSharding

from coat_jax import codecs, encoded
from coat_jax.optax_coat import coat_adamw
from coat_jax.optimizer import report as reports_module
from coat_jax.optimizer.report import state_bytes, state_report
from tests import cases
from tests.optimizer.adam_states import from_adam


def llama2_7b():
  """Returns abstract f32 parameters of Llama-2-7B, with stacked layers."""
  layers, h, f, vocabulary = 32, 4096, 11008, 32000
  shapes = {
    "embed": {"embedding": (vocabulary, h)},
    "layers": {
      "attn": {
        "norm": {"scale": (layers, h)},
        "qkv": {"kernel": (layers, h, 3 * h)},
        "out": {"kernel": (layers, h, h)},
      },
      "mlp": {
        "norm": {"scale": (layers, h)},
        "gate_up": {"kernel": (layers, h, 2 * f)},
        "down": {"kernel": (layers, f, h)},
      },
    },
    "norm": {"scale": (h,)},
    "head": {"kernel": (h, vocabulary)},
  }
  return jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


@pytest.mark.parametrize(
  "codec, most",
  [
    (codecs.coat(), 2.09),
    (codecs.coat_e8m0(), 2.04),
    (codecs.log8(), 2.04),
    (codecs.fp8(), 2.07),
    (codecs.bfloat16(), 4.001),
    (codecs.float32(), 8),
  ],
  ids=lambda x: getattr(x, "name", ""),
)
def test_state_bytes_of_llama2_7b(codec, most):
  state = jax.eval_shape(coat_adamw(1e-3, codec=codec).init, llama2_7b())
  size = state_bytes(state)
  assert size.parameters == 6_738_415_616
  assert size.total == pytest.approx(size.parameters * size.bytes_per_param)
  # A state is at least as large as its codes; count and scalars are negligible.
  codes = 2 * (8 if codec.name == "float32" else 1)
  assert min(codes, most - 0.1) <= size.bytes_per_param <= most + 1e-7


def test_state_bytes_finds_the_state_in_any_tree():
  params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
  # Each moment has codes, 5 bytes for each of 64 groups, f32 biases, and
  # placeholders (4 + 1 bytes) for statistics of biases. There is one count.
  want = 2 * (4096 + 64 * 5 + 64 * 4 + 5) + 4
  solver = optax.chain(optax.clip(1.0), coat_adamw(1e-3))
  assert state_bytes(solver.init(params)).total == want
  size = state_bytes(jax.eval_shape(solver.init, params))
  assert size == (want, 4160, want / 4160)
  model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, solver, wrt=nnx.Param)
  assert state_bytes(optimizer.opt_state).total == want
  with pytest.raises(ValueError, match="must contain an EncodedState or a"):
    state_bytes(optax.adam(1e-3).init(params))


def test_state_bytes_counts_any_state_if_params_are_passed():
  params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
  with pytest.raises(ValueError, match="or pass params, to count any"):
    state_bytes(optax.adam(1e-3).init(params))
  shapes = jax.eval_shape(lambda: params)
  for solver, want in (
    (optax.adam(1e-3), 2 * 4 * 4160 + 4),
    (optax.sgd(1e-2), 0),
    # There is one byte per value, 5 bytes for each of 64 groups, f32 biases,
    # placeholders for their statistics, and two counts.
    (encoded(optax.lion(1e-3), codecs.coat()), 4096 + 64 * 5 + 4 * 64 + 5 + 8),
  ):
    size = state_bytes(solver.init(params), shapes)
    assert size == (want, 4160, want / 4160)
  # Masked parameters have no moments, so they count only if `params` is passed.
  solver = optax.chain(
    optax.masked(coat_adamw(1e-3), {"w": True, "b": False}),
    optax.trace(0.9),
  )
  moments = 2 * (4096 + 64 * 5) + 4
  state = jax.eval_shape(solver.init, params)
  assert state_bytes(state) == (moments, 4096, moments / 4096)
  total = moments + 4 * 4160
  assert state_bytes(state, params) == (total, 4160, total / 4160)


def test_state_report_describes_the_moments_of_each_codec():
  mu, nu = (jnp.asarray(x) for x in cases.moments((64, 256)))
  nu = nu.at[0].set(0.0)  # Rows of zeros must not affect powers.
  reference = optax.ScaleByAdamState(
    jnp.int32(5),
    {"w": mu, "norm": {"scale": mu[0]}},
    {"w": nu, "norm": {"scale": nu[1]}},
  )
  reports = {}
  for name in ("coat", "coat_e8m0", "log8", "fp8", "bfloat16"):
    codec = getattr(codecs, name)()
    state = from_adam(reference, codec)
    report = state_report(state, reference=reference)
    assert json.loads(json.dumps(report)) == report
    assert set(report) == {"w", "norm/scale"}
    assert report["w"]["parameters"] == 64 * 256
    assert (report["w"]["encoded"], report["norm/scale"]["encoded"]) == (
      True,
      False,
    )
    assert report["norm/scale"]["nu"] == {"zeroed": 0, "relative_error": 0}
    reports[name] = report["w"]
  coat, e8m0 = reports["coat"], reports["coat_e8m0"]
  for moment in ("mu", "nu"):
    power = coat[moment]["power"]
    assert 1 / 16 <= power["min"] <= power["median"] <= power["max"] < 15.9
    # Power-of-two bounds are up to an octave wider at each end, so powers are
    # smaller.
    assert e8m0[moment]["power"]["median"] < power["median"]
    assert "power" not in reports["log8"][moment]
    assert 0.2 < coat[moment]["codes_used"] <= 1
  assert coat["nu"]["power"]["median"] < coat["mu"]["power"]["median"] * 2
  # Without expansion, small second moments become zero.
  assert coat["nu"]["zeroed"] == 0 < reports["fp8"]["nu"]["zeroed"]
  assert "codes_used" not in reports["bfloat16"]["mu"]
  # The error is at most half an ulp of bfloat16.
  assert 0 < reports["bfloat16"]["mu"]["relative_error"] < 2.0**-8
  # Without a reference, all zeros are counted.
  alone = state_report(from_adam(reference, codecs.coat()))
  assert alone["w"]["nu"]["zeroed"] == 1 / 64
  assert "relative_error" not in alone["w"]["nu"]


def test_reference_may_be_a_chain_with_one_such_state():
  params = {"w": jnp.ones((64, 128))}
  state = coat_adamw(1e-3).init(params)
  exact = optax.adamw(1e-3).init(params)
  report = state_report(state, reference=exact)
  assert report == state_report(state, reference=exact[0])
  with pytest.raises(TypeError, match="one state with .*, got 2 in a tuple;"):
    state_report(state, reference=(exact, exact))


def test_state_report_does_not_depend_on_explicit_axes():
  mu, nu = ({"w": jnp.asarray(x)} for x in cases.moments((8, 512)))
  adam = optax.ScaleByAdamState(jnp.int32(5), mu, nu)
  state = from_adam(adam, codecs.coat(group_size=128))
  # Each device holds half of a group.
  mesh = jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Explicit,))
  split = NamedSharding(mesh, P(None, "tensor"))
  placed = jax.tree.map(
    lambda x: jax.device_put(x, split) if x.shape == (8, 512) else x, state
  )
  with jax.set_mesh(mesh):
    assert state_report(placed) == state_report(state)


def test_state_report_refuses_other_references_and_two_states():
  params = {"w": jnp.ones((64, 64))}
  state = coat_adamw(1e-3).init(params)
  other = optax.adam(1e-3).init({"w": jnp.ones(3)})[0]
  with pytest.raises(ValueError, match="must have a moment for each parameter"):
    state_report(state, reference=other)
  found = r"got 2; pass one of opt_state\[0\]\[0\], opt_state\[1\]\[0\]"
  with pytest.raises(ValueError, match=found):
    state_report((state, state))


def test_report_examples_run():
  assert not doctest.testmod(reports_module).failed
