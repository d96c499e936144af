# SPDX-License-Identifier: Apache-2.0
"""Tests the codecs of `studies.race_codecs`, and their 4-bit states."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import NamedSharding

from coat_jax import coat_adamw
from coat_jax.numerics.formats import array_bytes
from coat_jax.optimizer import (
  from_plain_state,
  state_bytes,
  state_report,
  state_shardings,
  to_plain_state,
)
from studies import race_codecs
from tests import cases
from tests.optimizer.test_sharding import assert_bits, make_mesh, step_of

MU, NU = cases.moments((16, 256))


def roundtrip(group, x, noise=None):
  return np.asarray(group.decode(group.encode(jnp.asarray(x), noise)))


def grids(name):
  """Returns the levels of both moments as shares of amax, from the papers."""
  if name == "companded":
    z = np.arange(128) / 127
    return z / (2 - z), (np.arange(256) / 255) ** 2
  magnitudes = {
    "log4": [0, *(2.0 ** np.arange(-6, 1))],
    "e2m1": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) / 6,
  }
  return np.asarray(magnitudes[name]), None


def shares(x, size=128):
  """Returns |x| in groups, and the amax of each group."""
  magnitude = np.abs(np.float64(x)).reshape(-1, size)
  return magnitude, magnitude.max(-1, keepdims=True)


@pytest.mark.parametrize("moment", [0, 1])
def test_companded_values_are_the_nearest_levels(moment):
  codec = race_codecs.companded(rounding="nearest")
  x = (MU, NU)[moment]
  magnitude, amax = shares(x)
  levels = grids("companded")[moment]
  every = levels[1 if moment else 0 :] * amax[..., None]
  nearest = np.abs(magnitude[..., None] - every).min(-1)
  decoded = np.abs(roundtrip(codec.groups[moment], x)).reshape(-1, 128)
  # The codec computes distances in f32, so its level may be farther than the
  # nearest by a rounding error.
  assert np.all(np.abs(decoded - magnitude) <= nearest + 1e-6 * amax)


@pytest.mark.parametrize("name", ["log4", "e2m1"])
def test_first_moments_of_4_bits_are_rounded_to_a_neighbour(name):
  group = getattr(race_codecs, name)(group_size=128).mu
  words = jax.random.uniform(jax.random.key(0), MU.shape, minval=1e-6)
  found = group.encode(jnp.asarray(MU), words)
  assert found.codes.dtype == jnp.int4
  bound = np.float64(found.amax)[..., None]
  magnitude, amax = shares(MU)
  magnitude = magnitude.reshape(16, 2, 128)
  amax = amax.reshape(bound.shape)
  assert np.all((bound >= amax) & (bound <= amax * (1 + 2.0**-6)))
  levels = grids(name)[0]
  place = np.searchsorted(levels, magnitude / bound, side="right") - 1
  below, above = (levels[np.minimum(place + i, 7)] * bound for i in (0, 1))
  # A value is rounded up if its fraction exceeds the noise.
  up = magnitude - below > np.asarray(words).reshape(16, 2, 128) * (
    above - below
  )
  want = np.where(up, above, below).reshape(MU.shape) * np.sign(MU)
  got = np.asarray(group.decode(found))
  assert np.mean(~np.isclose(got, want, rtol=1e-5)) < 1e-4
  assert len(np.unique(np.asarray(found.codes, int))) > 10


@pytest.mark.slow
def test_small_second_moments_of_4_bits_do_not_become_zero():
  group = race_codecs.log4(group_size=4).nu
  x = np.float32([[1, 2.0**-30, 0, 0.75], [0, 0, 0, 0]])
  found = group.encode(jnp.asarray(x), jnp.full(x.shape, 0.5))
  assert found.codes.dtype == jnp.int4
  decoded = np.asarray(group.decode(found))
  assert decoded[0, 0] == 1 and decoded[0, 1] == 2.0**-21
  assert not decoded[x == 0].any()
  # With 14 steps in 21 octaves, the neighbours of 0.75 are 2^-1.5 and 1.
  assert decoded[0, 3] in (np.float32(2.0**-1.5), 1)
  wide = np.exp2(np.linspace(-21, 0, 400, dtype=np.float32))[None]
  group = race_codecs.log4(group_size=400).nu
  levels = np.unique(roundtrip(group, wide, jnp.full(wide.shape, 0.5)))
  np.testing.assert_allclose(np.diff(np.log2(levels)), 1.5, atol=1e-5)
  assert len(levels) == 15


def test_codes_of_4_bits_take_half_a_byte():
  assert array_bytes((3, 5), jnp.dtype("int4")) == 8
  params = {"w": jax.ShapeDtypeStruct((256, 1024), jnp.float32)}
  optimizer = coat_adamw(1e-3, codec=race_codecs.log4())
  size = state_bytes(jax.eval_shape(optimizer.init, params))
  assert size.bytes_per_param == pytest.approx(1 + 4 / 64, abs=1e-4)
  compiled = jax.jit(optimizer.init).lower(params).compile()
  # XLA rounds sizes up, and also counts the pointers of a tuple.
  assert abs(compiled.memory_analysis().output_size_in_bytes - size.total) < 512


@pytest.mark.slow
def test_report_counts_the_codes_of_4_bits():
  adam = optax.ScaleByAdamState(
    jnp.int32(1), {"w": jnp.asarray(MU)}, {"w": jnp.asarray(NU)}
  )
  like = jax.eval_shape(
    coat_adamw(1e-3, codec=race_codecs.log4()).init, {"w": jnp.ones(MU.shape)}
  )
  state = from_plain_state((adam, *like[1:]), like)
  report = state_report(state[0], reference=adam)["w"]
  used = len(np.unique(np.asarray(state[0].mu.codes["w"], int)))
  assert 10 < used <= 15
  assert report["mu"]["codes_used"] == used / 16
  assert 0.05 < report["nu"]["relative_error"] < 0.5
  back = to_plain_state(state)[0]
  np.testing.assert_array_equal(
    back.mu["w"], state[0].mu.codec.decode(state[0].mu.leaves()[0])
  )


@pytest.mark.slow
def test_sharded_step_of_4_bits_matches_one_device_bit_for_bit():
  optimizer = coat_adamw(1e-2, codec=race_codecs.log4())
  rng = np.random.default_rng(0)
  draws = [
    {
      "rows": jnp.asarray(rng.normal(size=(64, 128)), jnp.float32),
      "columns": jnp.asarray(rng.normal(size=(8, 1024)), jnp.float32),
    }
    for _ in range(3)
  ]
  params, step = draws[0], step_of(optimizer)
  want = jax.jit(step)(params, jax.jit(optimizer.init)(params), draws[1])
  want = jax.jit(step)(*want, draws[2])
  mesh = make_mesh()
  where = {
    "rows": NamedSharding(mesh, P("fsdp")),
    "columns": NamedSharding(mesh, P(None, ("fsdp", "tensor"))),
  }
  promised = state_shardings(optimizer.init, params, where)
  draws = jax.device_put(draws, [where] * 3)
  with jax.set_mesh(mesh):
    state = jax.jit(optimizer.init, out_shardings=promised)(draws[0])
    step = jax.jit(step, out_shardings=(where, promised))
    got = step(*step(draws[0], state, draws[1]), draws[2])
  assert got[1][0].nu.codes["columns"].sharding == where["columns"]
  assert_bits(got, want)
