# SPDX-License-Identifier: Apache-2.0
"""Operations on a mesh with explicit axes: the values of one device."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from benchmarks import cases as models
from benchmarks.cases import OpCase
from benchmarks.ops import all_cases
from coat_jax.ops.explicit import inferred, partitioned, product_spec
from coat_jax.qtensor import QTensor
from tests.comparing import jit
from tests.matrices import quick
from tests.ops.test_conformance import assert_conforms, name_of

# Over 8 devices sums are in another order.
TOLERANCE = 2e-5


def split(mesh, x):
  """Rows over data and columns over tensor, wherever they can be."""
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
def test_an_operation_computes_what_it_does_on_one_device(case):
  call = jit(lambda *args: case.call(case.operation, *args))
  args = case.arrays()
  expected = call(*args)
  mesh = jax.make_mesh((4, 2), ("data", "tensor"))
  with jax.set_mesh(mesh):
    found = call(*jax.tree.map(lambda x: split(mesh, x), args))
  assert_conforms(found, expected, TOLERANCE)


def test_results_are_sharded_as_arguments_are():
  mesh = jax.make_mesh((4, 2), ("data", "tensor"))

  def array(shape, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

  def check(x, w, fsdp):
    assert product_spec(x, w) == P("data", None, None, "tensor")
    # An axis that splits rows already (FSDP by columns) splits no columns.
    assert product_spec(x, fsdp) == P("data", None, None)
    out = dict(
      x=x,
      w=w,
      stats=jnp.zeros((8, 16)),
      h=jnp.zeros((8, 16, 96)),
      heads=jnp.zeros((8, 16, 4, 24)),
      odd=jnp.zeros((8, 16, 3)),
      x_columns=jnp.zeros((64, 128)),
      h_columns=jnp.zeros((96, 128)),
      scale=jnp.zeros(()),
      groups=QTensor(jnp.zeros((8, 16, 96)), jnp.zeros((8, 16, 6))),
      short=QTensor(jnp.zeros((8, 16, 96)), jnp.zeros((8, 16, 3))),
    )
    tokens, columns = P("data", None), P("data", None, "tensor")
    found = inferred(out, (x, w))
    found = jax.tree.map(lambda spec: P(*map(_name, spec)), found)
    assert found == dict(
      x=P("data", None, None),
      w=P(None, None, "tensor"),
      stats=tokens,
      h=columns,
      heads=columns,
      odd=P("data", None, None),
      x_columns=P(None, "data"),
      h_columns=P("tensor", "data"),
      scale=P(),
      groups=QTensor(columns, columns),
      short=QTensor(columns, P("data", None, None)),
    )
    return x

  w = array((64, 2, 48), None, None, "tensor")
  fsdp = array((64, 96), None, "data")
  with jax.set_mesh(mesh):
    jax.eval_shape(check, array((8, 16, 64), "data"), w, fsdp)


def _name(entry):
  """An entry's only name."""
  return entry[0] if isinstance(entry, tuple) else entry


def test_without_explicit_axes_nothing_is_added():
  def program(f):
    return str(jax.make_jaxpr(f)(jnp.ones((8, 16))))

  whole = functools.partial(partitioned, jnp.sin)
  assert program(whole) == program(jnp.sin)
  auto = AbstractMesh((2,), ("data",), (AxisType.Auto,))
  with jax.sharding.use_abstract_mesh(auto):
    assert program(whole) == program(jnp.sin)
