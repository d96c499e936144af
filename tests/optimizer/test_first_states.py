# SPDX-License-Identifier: Apache-2.0
"""Tests that the first state encodes zeros."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

from coat_jax import coat_adamw, coat_lion, codecs, encoded
from coat_jax.codecs import Encoded, MomentCodec
from coat_jax.codecs.group import Plain
from coat_jax.optimizer.state import encode_zeros, moments_in
from tests.codecs.test_conformance import (
  VARIANTS,
  build,
  noise_like,
)
from tests.comparing import assert_same_bits, jit
from tests.matrices import quick

# Rows have whole groups of 16, less than a group, or a short last group.
SHAPES = (4, 32), (2, 3, 7), (3, 40), (70,), (0, 24)


@dataclasses.dataclass(frozen=True)
class Positions:
  """A codec that stores positions in groups, and lengths of groups."""

  group_size: int = 16
  needs_noise = True

  def encode(self, x, noise):
    n, size = x.shape[-1], self.group_size
    place = jnp.broadcast_to(jnp.arange(n) % size, x.shape)
    start = jnp.arange(-(-n // size)) * size
    width = jnp.minimum(size, n - start).astype(jnp.uint8)
    width = jnp.broadcast_to(width, (*x.shape[:-1], *width.shape))
    return Encoded(place.astype(jnp.int8), jnp.float32(0), width)

  def decode(self, encoded):
    return jnp.zeros(encoded.codes.shape, jnp.float32)


@dataclasses.dataclass(frozen=True)
class WithoutGroups:
  """A codec without a group size, whose codes depend on the column."""

  needs_noise = False

  def encode(self, x, noise):
    codes = jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=jnp.uint8), x.shape)
    return Encoded(codes, jnp.float32(3), jnp.uint8(4))

  def decode(self, encoded):
    return jnp.zeros(encoded.codes.shape, jnp.float32)


OTHERS = {
  "positions": MomentCodec(name="positions", mu=Positions(), nu=Positions(8)),
  "without": MomentCodec(name="no", mu=WithoutGroups(), nu=WithoutGroups()),
}


def everything(path, leaf):
  return True


def whole(group, zeros, draw=None):
  """Encodes a whole leaf of zeros; without `draw`, the noise is 0.5."""
  if not group.needs_noise:
    return group.encode(zeros, None)
  noise = draw(zeros) if draw else jnp.full(zeros.shape, 0.5)
  return group.encode(zeros, noise)


def check_state(codec, state, draw=None):
  """Checks that a state of `parameters()` encodes zeros."""

  @jit
  def encode(zeros):
    return [
      {name: whole(group, x, draw) for name, x in zeros.items()}
      for group in codec.groups
    ]

  # Pass zeros as arguments, so that XLA does not encode them while compiling.
  zeros = {name: jnp.zeros(x.shape) for name, x in parameters().items()}
  for moment, want in zip(moments_in(state), encode(zeros), strict=True):
    codes, amax, range_ = moment.codes, moment.amax, moment.range
    got = {name: (codes[name], amax[name], range_[name]) for name in zeros}
    assert_same_bits(got, want)


# In every run, test one codec for each layout of a state: with f32 and uint8
# statistics, only uint8 statistics, 4-bit codes, a user's codec, and f32.
FIRST = "coat-stochastic-e4m3", "log8-stochastic", "log4", "make-stochastic"
every_variant = pytest.mark.parametrize(
  "variant", quick(5, dict.fromkeys((*FIRST, "float32", *VARIANTS)))
)


def parameters():
  return {str(shape): jnp.ones(shape, jnp.bfloat16) for shape in SHAPES}


@every_variant
def test_first_state_matches_encoded_leaves_of_zeros(variant):
  codec = build(*VARIANTS[variant])
  solver = coat_adamw(1e-3, codec=codec, quantize_mask=everything)
  check_state(codec, jit(solver.init)(parameters()))


@pytest.mark.parametrize("name", OTHERS)
def test_codes_of_zeros_may_depend_on_the_position_in_a_group(name):
  codec = OTHERS[name]
  solver = coat_adamw(1e-3, codec=codec, quantize_mask=everything)
  check_state(codec, jit(solver.init)(parameters()))


@every_variant
def test_encoded_fields_start_as_encoded_leaves_of_zeros(variant):
  codec = build(*VARIANTS[variant])
  solver = encoded(optax.adam(1e-3), codec, quantize_mask=everything)
  # Any random words round zeros to the same codes.
  check_state(codec, jit(solver.init)(parameters()), noise_like)


@pytest.mark.parametrize("name", quick(1, ["coat", "log8"]))
def test_first_state_is_the_same_without_jit(name):
  codec = codecs.build(name, group_size=16)
  params = parameters() | {"c": jnp.ones(3, jnp.complex64), "s": jnp.ones(())}

  def mask(path, leaf):
    return path not in ("c", "s")

  for solver in (
    coat_adamw(1e-3, codec=codec, quantize_mask=mask),
    coat_lion(1e-3, codec=codec, quantize_mask=mask),
    encoded(optax.adam(1e-3), codec, quantize_mask=mask),
  ):
    state = solver.init(params)
    assert_same_bits(state, jit(solver.init)(params))
    assert moments_in(state)[0].codes["c"].dtype == jnp.complex64


# Leaves as (shape, spec). "whole": each device holds whole groups of 16.
# "across": two devices hold three groups. "short": the last group is short.
# "split": devices hold parts of a group. "rows": only rows are sharded.
LEAVES = {
  "whole": ((8, 64), P("x", "y")),
  "across": ((4, 48), P("x", "y")),
  "short": ((2, 8, 50), P(None, "x", "y")),
  "split": ((2, 8), P(None, ("x", "y"))),
  "rows": ((8, 40), P(("x", "y"), None)),
  "f32": ((8,), P("x")),
}


def on_mesh(kind):
  mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
  params = {
    name: jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))
    for name, (shape, spec) in LEAVES.items()
  }
  return mesh, params


def matrices(path, leaf):
  return leaf.ndim > 1


def spec_like(x, spec):
  """Returns the spec without the names of axes that would split x unevenly."""
  sizes = {"x": 4, "y": 2, ("x", "y"): 8, None: 1}
  pairs = zip(x.shape, spec, strict=False)
  return P(*(name if n % sizes[name] == 0 else None for n, name in pairs))


EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


@pytest.mark.parametrize(
  "name, kind, make",
  quick(
    3,
    [
      ("coat", EXPLICIT, coat_lion),
      ("positions", EXPLICIT, encoded),
      ("positions", AUTO, coat_lion),
      ("coat", EXPLICIT, encoded),
      ("coat", AUTO, coat_lion),
      ("positions", EXPLICIT, coat_lion),
    ],
  ),
)
def test_first_state_is_sharded_like_the_parameters(name, kind, make):
  codec = {"coat": codecs.coat(16), **OTHERS}[name]
  if make is coat_lion:
    solver = coat_lion(1e-3, codec=codec, quantize_mask=matrices)
  else:
    solver = encoded(optax.lion(1e-3), codec, quantize_mask=matrices)
  want = jax.jit(solver.init)({k: jnp.ones(s) for k, (s, _) in LEAVES.items()})
  mesh, params = on_mesh(kind)
  with jax.set_mesh(mesh):
    states = [solver.init(params)]
    if kind == EXPLICIT:  # On Auto axes, `jit` does not know shardings.
      states.append(jax.jit(solver.init)(params))
  if make is coat_lion:  # This also works without a set mesh.
    states.append(solver.init(params))
  for state in states:
    assert_same_bits(state, want)
    for moment in moments_in(state):
      for leaf, (_, spec) in LEAVES.items():
        for x in (moment.codes[leaf], moment.amax[leaf], moment.range[leaf]):
          where = NamedSharding(mesh, spec_like(x, spec))
          assert x.sharding.is_equivalent_to(where, x.ndim), (leaf, x.shape)
          axes = jax.typeof(x).sharding.mesh.explicit_axes
          assert len(axes) == 2 * (kind == EXPLICIT)


@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
def test_init_in_jit_may_close_over_the_parameters(kind):
  _, params = on_mesh(kind)
  solver = coat_lion(1e-3, codec=codecs.coat(16), quantize_mask=matrices)
  assert_same_bits(jax.jit(lambda: solver.init(params))(), solver.init(params))


@pytest.mark.parametrize("make", [coat_lion, encoded])
def test_first_state_varies_over_devices_like_the_parameters(make):
  solver = (
    coat_lion(1e-3, codec=codecs.coat(16), quantize_mask=matrices)
    if make is coat_lion
    else encoded(optax.lion(1e-3), codecs.coat(16), quantize_mask=matrices)
  )
  mesh, params = on_mesh(AxisType.Auto)

  def local(params):
    state = solver.init(params)
    for leaf in LEAVES:
      for moment in moments_in(state):
        for x in (moment.codes[leaf], moment.amax[leaf], moment.range[leaf]):
          axes = jax.typeof(params[leaf]).manual_axis_type.varying
          want = axes if x.ndim else frozenset()
          assert jax.typeof(x).manual_axis_type.varying == want, leaf
    return params

  specs = {name: spec for name, (_, spec) in LEAVES.items()}
  run = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=specs)
  jax.eval_shape(run, params)


def test_state_of_a_committed_leaf_is_on_its_device():
  device = jax.devices()[3]
  leaf = jax.device_put(jnp.ones((3, 40)), device)
  for x in jax.tree.leaves(encode_zeros(codecs.coat().mu, leaf)):
    assert x.devices() == {device} and x.committed


def test_abstract_leaf_and_number_get_a_state():
  group = codecs.coat(16).mu
  mesh, _ = on_mesh(EXPLICIT)
  where = NamedSharding(mesh, P("x", "y"))
  leaf = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16, sharding=where)
  with jax.set_mesh(mesh):
    stored = encode_zeros(group, leaf)
  assert stored.codes.sharding == stored.amax.sharding == where
  assert_same_bits(stored, encode_zeros(group, np.ones((8, 64))))
  assert encode_zeros(Plain("float32"), 1.0).codes == 0


def test_init_encodes_only_one_group_of_each_length():
  leaf = jax.ShapeDtypeStruct((64, 1000), jnp.float32)
  jaxpr = jax.make_jaxpr(lambda x: encode_zeros(codecs.coat().mu, x))(leaf)
  largest = max(
    v.aval.size
    for equation in jaxpr.eqns
    for v in equation.outvars
    if v.aval.dtype == jnp.float32
  )
  # The 8 statistics of each of 64 rows outnumber the zeros that are encoded: a
  # group of 128 and one of 104.
  assert largest == 64 * 8


def test_fields_that_do_not_start_as_zeros_are_encoded():
  params = {"w": jnp.linspace(1, 2, 64 * 128).reshape(64, 128)}
  for inner in (optax.adagrad(1e-3), optax.rmsprop(1e-3, initial_scale=0.5)):
    state = jax.jit(encoded(inner).init)(params)
    [nu] = moments_in(state)
    values = nu.codec.decode(nu.leaves()[0])
    field = inner.init(params)[0][0]["w"]
    np.testing.assert_allclose(values, field, rtol=1e-6)
