# SPDX-License-Identifier: Apache-2.0
"""Compares the TPU kernel of optimizers with its definition, and compiles it.

Kernels are interpreted on a CPU. With libtpu (`make test-tpu`) they are also
compiled for four generations of TPUs, without a TPU.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from benchmarks import tpu
from coat_jax import codecs, ops
from coat_jax.numerics.stochastic import LeafPart, leaf_key
from coat_jax.optimizer import weights
from coat_jax.optimizer.adam import adam_scalars, adam_update, adamw_step
from coat_jax.optimizer.lion import lion_scalars, lion_step
from coat_jax.optimizer.step import StepScalars
from tests.matrices import quick

F32, BF16 = jnp.float32, jnp.bfloat16
TPUS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
ADAM = adam_scalars(jnp.int32(5), 0.9, 0.999, 1e-8, 0.0)
NESTEROV = adam_scalars(jnp.int32(5), 0.9, 0.999, 1e-8, 1e-12, nesterov=True)
LION = lion_scalars(0.9, 0.99)
STEP = StepScalars(*map(jnp.float32, (1e-3, 0.1)), None)
CLIPPED = STEP._replace(grad_scale=jnp.float32(0.25))
COAT = codecs.coat()


@dataclasses.dataclass(frozen=True)
class Case:
  """One call of an operation on a leaf of `shape`, or on a layer or shard."""

  op: ops.Op = adamw_step
  shape: tuple[int, ...] = (64, 384)
  dtype: jnp.dtype = F32
  codec: codecs.MomentCodec = COAT
  layer: int | None = None
  start: tuple[int, ...] | None = None
  whole: tuple[int, ...] | None = None
  scalars: tuple = ADAM
  step: StepScalars = STEP
  is_split: bool = False

  @property
  def groups(self):
    moments = (self.codec.mu, self.codec.nu)
    return moments[:1] if self.op is lion_step else moments

  def arrays(self):
    """Makes the arguments; moments span many octaves and include zeros."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=self.shape) * np.exp(3 * rng.normal(size=self.shape))
    x[..., :5] = 0
    g = rng.normal(size=self._own_shape())
    g[..., 0] = 0
    p = rng.normal(size=self.shape)
    return self._arguments(*(jnp.asarray(a, F32) for a in (x, g, p)))

  def specs(self):
    """Returns the arguments' shapes and dtypes."""
    shapes = self.shape, self._own_shape(), self.shape
    values = [jax.ShapeDtypeStruct(shape, F32) for shape in shapes]
    return jax.eval_shape(self._arguments, *values)

  def _own_shape(self):
    return self.shape if self.layer is None else (1, *self.shape[1:])

  def _arguments(self, x, g, p):
    moments = x, x * x
    stored = tuple(
      codec.encode(moment, jnp.full_like(x, 0.5) if codec.needs_noise else None)
      for moment, codec in zip(moments, self.groups, strict=False)
    )
    part = LeafPart(
      leaf_key(1, 2, 3),
      None if self.start is None else jnp.array(self.start, jnp.uint32),
      self.whole,
      None if self.layer is None else jnp.int32(self.layer),
    )
    g = g.astype(self.dtype)
    p = weights.split(p) if self.is_split else p.astype(self.dtype)
    if self.op is adam_update:
      return g, stored, part, self.scalars
    return p, g, stored, part, self.scalars, self.step

  def run(self, function):
    return jax.jit(functools.partial(function, groups=self.groups))


CASES = {
  "coat": Case(),
  "update": Case(adam_update),
  "nesterov": Case(scalars=NESTEROV),
  "clipped": Case(step=CLIPPED),
  "nearest": Case(codec=codecs.coat(rounding="nearest")),
  "e5m2": Case(codec=codecs.coat(second="e5m2")),
  "log8": Case(codec=codecs.log8()),
  "e8m0": Case(codec=codecs.coat_e8m0()),
  "fp8": Case(codec=codecs.fp8()),
  "bf16": Case(dtype=BF16),
  "lion": Case(lion_step, scalars=LION),
  "lion bf16": Case(lion_step, scalars=LION, dtype=BF16),
  "layer": Case(shape=(3, 32, 256), layer=1),
  "layer of a shard": Case(
    lion_step, (3, 32, 256), layer=2, scalars=LION,
    start=(0, 32, 256), whole=(3, 64, 512),
  ),
  "shard": Case(
    shape=(3, 32, 256), start=(3, 64, 256), whole=(6, 128, 512)
  ),
  "rows left over": Case(shape=(40, 256)),
  "two blocks of columns": Case(shape=(8, 2 * 128 * 128 + 128)),
  "24 bits": Case(dtype=BF16, is_split=True),
  "lion 24 bits": Case(lion_step, scalars=LION, is_split=True),
  "rows left over in each layer": Case(shape=(2, 40, 256)),
  "rows left over in a layer": Case(shape=(2, 3, 40, 128), dtype=BF16, layer=1),
  "stored by rows": Case(
    shape=(32, 12, 128), start=(0, 12, 128), whole=(32, 24, 256)
  ),
  "pair": Case(shape=(64, 2, 256)),
  "update of a pair": Case(adam_update, (2, 32, 2, 256), BF16),
  "lion of a pair": Case(lion_step, (40, 2, 256), BF16, scalars=LION),
  "e8m0 of a pair": Case(shape=(64, 2, 256), codec=codecs.coat_e8m0()),
  "two blocks of columns of a pair": Case(shape=(32, 2, 128 * 128)),
  "24 bits of a pair": Case(shape=(64, 2, 256), is_split=True),
  "layer of a pair": Case(shape=(3, 64, 2, 256), layer=1),
  "layer of a shard of a pair": Case(
    shape=(3, 64, 2, 256), layer=2,
    start=(0, 64, 0, 256), whole=(3, 128, 2, 512),
  ),
}  # fmt: skip
# `make test` runs these, which differ from each other most.
FIRST = (
  *("coat", "nearest", "e5m2", "log8", "lion bf16", "clipped", "shard"),
  *("layer of a shard", "24 bits", "rows left over", "pair", "stored by rows"),
)


@pytest.mark.parametrize("name", quick(12, dict.fromkeys([*FIRST, *CASES])))
def test_kernel_matches_definition_bit_for_bit(name):
  case = CASES[name]
  arrays = case.arrays()
  kernel = functools.partial(case.op.kernel("mosaic_tpu"), interpret=True)
  got, want = (case.run(f)(*arrays) for f in (kernel, case.op.definition))
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    bits = [np.asarray(x).reshape(-1).view(np.uint8) for x in (a, b)]
    np.testing.assert_array_equal(*bits)


def test_step_with_int8_matches_definition_within_2_ulp():
  """Allows for a product that decodes int8, which XLA may fuse with a sum."""
  case = Case(codec=codecs.int8())
  arrays = case.arrays()
  kernel = functools.partial(case.op.kernel("mosaic_tpu"), interpret=True)
  (p, stored), (want, other) = (
    case.run(f)(*arrays) for f in (kernel, case.op.definition)
  )
  jax.tree.map(np.testing.assert_array_equal, stored, other)
  # Fusing one product with a sum changes p or the update by half an ulp. All
  # such fusions together change p by at most 2 ulp.
  np.testing.assert_array_max_ulp(np.asarray(p), np.asarray(want), 2)


def test_nan_gradient_affects_only_its_parameter():
  case = Case()
  p, g, *rest = case.arrays()
  kernel = case.run(
    functools.partial(adamw_step.kernel("mosaic_tpu"), interpret=True)
  )
  new, _ = kernel(p, g.at[3, 200].set(jnp.nan), *rest)
  healthy, _ = kernel(p, g, *rest)
  is_nan = np.isnan(np.asarray(new))
  assert is_nan[3, 200] and is_nan.sum() == 1
  np.testing.assert_array_equal(
    np.asarray(new)[~is_nan], np.asarray(healthy)[~is_nan]
  )


@pytest.mark.parametrize(
  "case, reason",
  [
    (Case(codec=codecs.coat(group_size=64)), "needs groups of 128, got 64"),
    (Case(codec=codecs.float32()), "encoded in groups"),
    (Case(shape=(8, 100)), "multiple of 128"),
    (Case(shape=(128,)), "at least two axes"),
    (Case(shape=(4, 128), layer=1), "a multiple of 8 rows"),
    (Case(shape=(32, 2, 128), layer=1), "a multiple of 8 rows"),
    (Case(shape=(3, 12, 128), layer=1), "a multiple of 8"),
  ],
)
def test_unsupported_arguments_are_refused_with_a_reason(case, reason):
  arrays = case.specs()
  said = ops.explain(case.op, *arrays, groups=case.groups)
  assert "mosaic_tpu" not in said
  with pytest.raises(NotImplementedError, match=reason):
    jax.eval_shape(case.run(case.op.kernel("mosaic_tpu")), *arrays)


def test_explain_names_the_gpu_and_tpu_kernels():
  case = Case()
  said = ops.explain(case.op, *case.specs(), groups=case.groups)
  where = "mosaic on a GPU, mosaic_tpu on a TPU, xla elsewhere"
  assert said == f"adamw_step: {where}"


def test_only_the_program_for_a_tpu_contains_the_kernel():
  case = Case()
  device = AbstractDevice("TPU v6 lite", 1, platform="tpu")
  mesh = AbstractMesh((), (), abstract_device=device)
  arrays = case.specs()
  with jax.sharding.use_abstract_mesh(mesh):
    program = jax.make_jaxpr(case.run(case.op))(*arrays)
    assert "pallas_call" in str(program)
  assert "pallas_call" not in str(jax.make_jaxpr(case.run(case.op))(*arrays))


@pytest.mark.tpu
@pytest.mark.parametrize("name", TPUS)
@pytest.mark.parametrize(
  "case",
  [
    Case(shape=(4096, 16384)),
    Case(shape=(4096, 16384), dtype=BF16),
    Case(shape=(4096, 16384), codec=codecs.log8()),
    Case(shape=(4096, 16384), codec=codecs.coat(rounding="nearest")),
    Case(lion_step, (4096, 16384), scalars=LION),
    Case(shape=(2, 1024, 4096), layer=1),
    Case(shape=(1024, 53248)),
    Case(shape=(2, 512, 2, 11008)),
    Case(shape=(2, 512, 2, 11008), dtype=BF16, is_split=True),
    Case(shape=(32, 172, 4096), dtype=BF16),
  ],
  ids=[
    "f32", "bf16", "log8", "nearest", "lion", "layer", "wide",
    "pair", "24 bits of a pair", "stored by rows",
  ],
)  # fmt: skip
def test_compiled_step_is_one_kernel_with_little_temporary_memory(case, name):
  program = tpu.compile_for_tpu(
    name, case.run(case.op), *case.specs(), donate=(0, 2)
  )
  size = math.prod(case.shape)
  memory = program.memory_analysis()
  # v5p reserves some memory for its two cores, and copies statistics that do
  # not fill registers of 128 lanes.
  is_copied = name.startswith("v5p") and case.shape[-1] % 128**2
  assert memory.temp_size_in_bytes < 2**19 + (0.4 * size if is_copied else 0)
  # In f32, parameter and gradient have 8 bytes per value, and the state 2.08.
  bound = (10.3 if case.dtype == F32 else 6.3) + case.is_split
  assert memory.argument_size_in_bytes / size < bound
  assert program.as_text().count('custom_call_target="tpu_custom_call"') == 1


@pytest.mark.parametrize("dtype, moved", [(F32, 16.2), (BF16, 10.2)])
def test_kernel_reads_and_writes_each_array_once(dtype, moved):
  case = Case(shape=(64, 512), dtype=dtype)
  kernel = case.run(case.op.kernel("mosaic_tpu"))
  (call,) = (
    eqn
    for eqn in equations(jax.make_jaxpr(kernel)(*case.specs()).jaxpr)
    if eqn.primitive.name == "pallas_call"
  )
  arrays = [v.aval for v in (*call.invars, *call.outvars) if v.aval.ndim > 1]
  total = sum(a.size * a.dtype.itemsize for a in arrays)
  assert total / math.prod(case.shape) == pytest.approx(moved, abs=0.05)
  # The grid covers each array with two blocks of rows, so each block is copied
  # only once.
  grid = call.params["grid_mapping"].grid
  assert grid == (1, 2, 1)


def equations(jaxpr):
  """Yields all equations of a jaxpr, including those of inner jaxprs."""
  for eqn in jaxpr.eqns:
    yield eqn
    if eqn.primitive.name == "jit":
      yield from equations(eqn.params["jaxpr"].jaxpr)
