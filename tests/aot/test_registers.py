# SPDX-License-Identifier: Apache-2.0
"""Executes the PTX of the optimizer's kernels in NumPy.

tests/pallas/mosaic runs the same checks on a GPU. Here `ptx_machine` executes
the compiled PTX, including inlined instructions, which Pallas' interpreter
cannot run.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks import aot
from coat_jax.pallas.mosaic import leaf_step, square_means
from tests.aot.ptx_machine import Machine
from tests.aot.test_activation import assert_no_spills
from tests.pallas.mosaic import test_adam, test_factored, test_lion
from tests.pallas.mosaic.test_adam import CODECS

pytestmark = pytest.mark.aot

real_kernel = plgpu.kernel


def ptx_of(fn, specs, folder: Path) -> tuple[str, list[int]]:
  """Compiles a function with one kernel for an H200, and reads the PTX.

  Returns:
    The PTX, and for each parameter of the PTX the index of the array passed to
    it; inputs come first, then outputs.
  """
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
    before = set(folder.iterdir())
    aot.compile_for_h200(fn, *specs)
    new = set(folder.iterdir()) - before
  [ptx] = [path.read_text() for path in new if path.suffix == ".ptx"]
  [passes] = [path.read_text() for path in new if path.suffix == ".log"]
  launch = passes[passes.index("Dump Before GpuAssemblyToBinaryPass") :]
  # The host code loads the pointers to all arrays from one array.
  places = re.findall(r"(%\w+) = llvm.getelementptr \S+\[(\d+)\]", launch)
  index = {name: int(i) for name, i in places}
  loads = dict(re.findall(r"(%\w+) = llvm.load (%\w+) : ", launch))
  [arguments] = re.findall(r"gpu.launch_func .* args\((.*?)\)", launch)[:1]
  names = re.findall(r"(%\w+) : ", arguments)
  return ptx, [index.get(loads[name], 0) for name in names]


@pytest.fixture
def on_machine(monkeypatch, tmp_path):
  """Makes kernels of the optimizer run on `ptx_machine`."""
  known = {}

  def kernel(body, *, out_type, grid, interpret, **options):
    assert not interpret

    def call(*inputs):
      first = [x for x in inputs if isinstance(x, jax.Array)]
      refs = inputs[len(first) :]
      values = [ref[...] for ref in refs]

      def real(first, values):
        refs = [jax.new_ref(x) for x in values]
        run = real_kernel(body, out_type=out_type, grid=grid, **options)
        return run(*first, *refs), [jax.freeze(ref) for ref in refs]

      specs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (first, values)
      )
      key = f"{body} {specs}"
      if key not in known:
        known[key] = ptx_of(real, specs, tmp_path)
      ptx, order = known[key]
      out, treedef = jax.tree.flatten(out_type)
      out = [np.zeros(x.shape, x.dtype) for x in out]
      arrays = [*map(np.array, (*first, *values)), *out]
      Machine(ptx, [arrays[i] for i in order], (*grid, 1)).run()
      for ref, x in zip(refs, arrays[len(first) :], strict=False):
        ref[...] = x
      return treedef.unflatten(map(jnp.asarray, out))

    return call

  monkeypatch.setattr(leaf_step.plgpu, "kernel", kernel)
  # The machine has no TMA engine. tests/pallas/mosaic/test_turns.py tests turns
  # in Pallas' interpreter.
  monkeypatch.setattr(leaf_step, "_takes_turns", lambda *_: False)
  # Don't trace: in XLA's threads, even NumPy's arithmetic flushes subnormals.
  monkeypatch.setattr(leaf_step, "_step", leaf_step._step.__wrapped__)
  monkeypatch.setattr(square_means, "_means", square_means._means.__wrapped__)
  jax.clear_caches()  # A cached kernel would write no files.


@pytest.mark.parametrize(
  "name, dtype",
  [
    ("coat", jnp.float32),
    ("coat", jnp.bfloat16),
    ("coat_nearest", jnp.float32),
    ("coat_e5m2", jnp.bfloat16),
    ("coat_e8m0", jnp.float32),
    ("log8", jnp.bfloat16),
    ("fp8", jnp.float32),
  ],
)
def test_adam_matches_its_definition(on_machine, name, dtype):
  codec = CODECS[name]
  args = test_adam.problem(codec, dtype, shape=(64, 1024))
  _, (other, total, apart) = test_adam.compare(codec, 1, args, interpret=False)
  assert other <= 1e-3 * total
  assert np.mean(apart != 0) <= 1e-3 and np.max(apart) <= 1


@pytest.mark.parametrize("name", ["coat", "coat_e5m2", "coat_e8m0", "log8"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_warpgroups_that_take_turns_do_not_spill(
  monkeypatch, tmp_path, name, dtype
):
  monkeypatch.setattr(leaf_step, "_takes_turns", lambda *_: True)
  codec = CODECS[name]
  args = *test_adam.problem(codec, dtype), *test_adam.numbers(1)
  folder = tmp_path / "step"
  assert_no_spills(
    lambda *args: test_adam.by_kernel(codec, *args, interpret=False),
    *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args),
    folder=folder,
    count=1,
  )
  # Four arrays are copied before the loop. In the loop, warps wait for each
  # other before the next tile is copied; the interpreter does not check this.
  [ptx] = (path.read_text() for path in folder.glob("*.ptx"))
  copies = [x.start() for x in re.finditer(r"cp\.async\.bulk\.tensor", ptx)]
  assert len(copies) == 8
  assert "bar.sync" in ptx[copies[3] : copies[4]]


@pytest.mark.parametrize("shape", [(400, 384), (2, 64, 2, 128)])
def test_adam_with_a_factored_moment_matches_its_definition(
  on_machine, monkeypatch, shape
):
  monkeypatch.setattr(square_means, "_LEAST_PROGRAMS", 1)
  different, apart = test_factored.compare(
    test_factored.CODEC, jnp.bfloat16, shape, interpret=False
  )
  assert max(different, apart) <= 1e-3


@pytest.mark.parametrize(
  "name, kind", [("coat", "bfloat16"), ("log8", "split")]
)
def test_lion_matches_its_definition_on_a_shard(on_machine, name, kind):
  codec = test_lion.CODECS[name]
  args = test_lion.problem(codec, kind, (4, 8, 1024))
  part = dict(start=jnp.uint32([4, 8, 1024]), whole=(8, 16, 4096))
  numbers = test_lion.numbers(1, **part)
  want = test_lion.by_definition(codec, *args, *numbers)
  got = test_lion.by_kernel(codec, *args, *numbers, interpret=False)
  test_lion.check(codec, args, want, got)


@pytest.mark.parametrize("name", ["coat", "log8"])
def test_nonfinite_gradients_do_not_affect_other_groups(on_machine, name):
  test_adam.check_awkward(name, interpret=False)
