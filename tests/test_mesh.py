# SPDX-License-Identifier: Apache-2.0
"""Compares operations on a mesh and on one device, and checks shardings."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from benchmarks import cases as models
from benchmarks.cases import OpCase
from benchmarks.ops import all_cases
from coat_jax.mesh import product_spec, run_whole, spec_of
from tests.comparing import jit
from tests.matrices import quick
from tests.ops.test_conformance import assert_conforms, name_of

# Eight devices accumulate f32 sums in a different order.
TOLERANCE = 2e-5


def split(mesh, x):
  """Shards rows over data and columns over tensor, if divisible."""
  spec = [None] * x.ndim
  if x.ndim > 1 and x.shape[-1] % 2 == 0:
    spec[-1] = "tensor"
  if x.ndim and x.shape[0] % 4 == 0:
    spec[0] = "data"
  return jax.device_put(x, NamedSharding(mesh, P(*spec)))


OURS = [case for case in all_cases(models.SMOKE) if isinstance(case, OpCase)]


@pytest.mark.parametrize(
  "case",
  quick(4, [pytest.param(case, id=name_of(case)) for case in OURS]),
)
def test_operation_on_a_mesh_matches_one_device(case):
  call = jit(lambda *args: case.call(case.operation, *args))
  args = case.arrays()
  expected = call(*args)
  mesh = jax.make_mesh((4, 2), ("data", "tensor"))
  with jax.set_mesh(mesh):
    args = jax.tree.map(lambda x: split(mesh, x), args)
    found = run_whole(call, *args, out_specs=P())
  assert_conforms(found, expected, TOLERANCE)


def test_results_are_sharded_as_declared():
  mesh = jax.make_mesh((4, 2), ("data", "tensor"))

  def array(shape, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

  def check(x, w, fsdp):
    assert product_spec(x, w) == P("data", None, None, ("tensor",))
    # `data` already splits rows of the product, so it cannot split columns.
    assert product_spec(x, fsdp) == P("data", None, None)
    made = dict(
      codes=jnp.zeros((8, 16, 96)),
      heads=jnp.zeros((8, 16, 4, 24)),
      statistics=jnp.zeros((8, 16, 3)),
      scale=jnp.zeros(()),
    )
    spec = P("data", None, "tensor")
    out, saved = run_whole(lambda x: (made, x), x, out_specs=(spec, None))
    assert jax.tree.map(spec_of, out) == dict(
      codes=spec,
      heads=P("data", None, "tensor", None),
      # Three values cannot be split over two devices.
      statistics=P("data", None, None),
      scale=P(),
    )
    assert not jax.typeof(saved).sharding.mesh.explicit_axes
    return run_whole(jnp.sin, saved, out_specs=spec_of(x))

  w = array((64, 2, 48), None, None, "tensor")
  fsdp = array((64, 96), None, "data")
  with jax.set_mesh(mesh):
    jax.eval_shape(check, array((8, 16, 64), "data"), w, fsdp)


def test_run_whole_changes_no_program_without_explicit_axes():
  def program(f):
    return str(jax.make_jaxpr(f)(jnp.ones((8, 16))))

  whole = functools.partial(run_whole, jnp.sin, out_specs=P())
  assert program(whole) == program(jnp.sin)
  auto = AbstractMesh((2,), ("data",), (AxisType.Auto,))
  with jax.sharding.use_abstract_mesh(auto):
    assert program(whole) == program(jnp.sin)
