# SPDX-License-Identifier: Apache-2.0
"""Runs of two processes on this machine, each with one device.

The sum of two numbers does not depend on their order, so such a run is
bit-identical to a run of one process with two devices. (With four devices, a
loss sometimes differs in its last bit.)
"""

import contextlib
import shutil
import signal
import socket

import pytest

from tests.train import runs
from train.run.directory import RunDirectory
from train.run.processes import own_rows

# These tests start programs; make test-all runs them.
pytestmark = pytest.mark.slow

OPTIONS = dict(
  mesh="fsdp=2",
  batch=4,
  accumulate=2,
  steps=40,
  save_every=20,
  eval_every=20,
  # No test depends on these two options; these values compile fastest.
  recipe="bf16",
  optim__codec="float32",
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
  with runs.programs_on_disk(tmp_path_factory.mktemp("programs")) as cache:
    yield cache


@contextlib.contextmanager
def processes(out, *flags, environment, others=None, all_of_them=None):
  """Starts two processes, and kills those that still run at the end."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  started = [
    runs.start(
      out,
      "--distributed",
      *flags,
      environment={
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(index),
        **environment,
      },
      **{**OPTIONS, **(all_of_them or {})},
      **(others or {} if index else {}),
    )
    for index in range(2)
  ]
  try:
    yield started
  finally:
    for process in started:
      process.kill()
      process.wait()


def run_alone(out, *flags, environment):
  """Runs one process with two devices; returns what it printed."""
  environment = {"JAX_NUM_CPU_DEVICES": "2", **environment}
  process = runs.start(out, *flags, environment=environment, **OPTIONS)
  output = process.communicate(timeout=120)[0]
  assert process.returncode == 0, output
  return output


@pytest.fixture(scope="module")
def alone(tmp_path_factory, programs):
  """Returns the folder of a run of one process; tests do not change it."""
  out = tmp_path_factory.mktemp("runs") / "alone"
  run_alone(out, environment=programs)
  return out


def finish(started):
  """Waits for both processes; returns their exit statuses and outputs."""
  outputs = [process.communicate(timeout=120)[0] for process in started]
  return [process.returncode for process in started], outputs


def test_signal_to_one_process_stops_both_and_they_resume_bit_for_bit(
  tmp_path, programs, alone
):
  out = tmp_path / "two"
  with processes(out, environment=programs) as started:
    runs.wait_for_step(started[0], out, 5)
    started[1].send_signal(signal.SIGTERM)
    statuses, outputs = finish(started)
  assert statuses == [143, 143], outputs
  assert "SIGTERM: saving after this step" in outputs[1]
  assert "pass --resume to continue" in outputs[0]
  saved = RunDirectory(out).latest_step()
  assert 5 <= saved < 40

  with processes(out, "--resume", environment=programs) as started:
    statuses, outputs = finish(started)
  assert statuses == [0, 0], outputs
  assert f"resumed at step {saved}" in outputs[0]
  # Only the primary process prints.
  assert "parameters" in outputs[0] and "parameters" not in outputs[1]
  assert "held-out" in outputs[0] and "held-out" not in outputs[1]

  assert runs.losses(out) == runs.losses(alone)
  assert max(runs.losses(out)) >= (40, "loss")


def test_run_resumes_bit_for_bit_with_another_number_of_processes(
  tmp_path, programs, alone
):
  expected = runs.losses(alone)
  two = shutil.copytree(alone, tmp_path / "two")
  shutil.rmtree(two / "checkpoints" / "40")
  with processes(
    two, "--resume", environment=programs, all_of_them=dict(save_every=10)
  ) as started:
    statuses, outputs = finish(started)
  assert statuses == [0, 0], outputs
  assert "resumed at step 20" in outputs[0]
  assert runs.losses(two) == expected

  one = shutil.copytree(two, tmp_path / "one")
  shutil.rmtree(one / "checkpoints" / "40")
  output = run_alone(one, "--resume", environment=programs)
  assert "resumed at step 30" in output
  assert runs.losses(one) == expected


def test_data_that_one_process_cannot_read_stops_both(tmp_path):
  others = dict(data__path=tmp_path / "missing")
  with processes(tmp_path / "out", environment={}, others=others) as started:
    statuses, outputs = finish(started)
  assert statuses == [2, 2], outputs
  assert "path must exist" in outputs[1]
  assert "error" not in outputs[0]
  assert not (tmp_path / "out").exists()


def test_distributed_run_without_its_environment_is_rejected(tmp_path):
  process = runs.start(tmp_path, "--distributed", environment={}, **OPTIONS)
  output = process.communicate(timeout=60)[0]
  assert process.returncode == 2
  assert "could not find the other processes" in output
  assert "Traceback" not in output


class Shards:
  """Replaces a sharding; `bounds` are the rows of this process's devices."""

  def __init__(self, *bounds):
    self.bounds = bounds

  def addressable_devices_indices_map(self, shape):
    assert shape == (24,)
    return {
      device: (slice(start, stop),)
      for device, (start, stop) in enumerate(self.bounds)
    }


@pytest.mark.parametrize(
  "sharding, index, count",
  [
    (None, 0, 1),
    (Shards((None, None), (None, None)), 0, 1),
    (Shards((0, 6), (6, 12)), 0, 2),
    (Shards((12, 18), (18, 24)), 1, 2),
    # Devices along the axis tensor read the same rows.
    (Shards((8, 12), (8, 12)), 2, 6),
    (Shards((6, 12)), 1, 4),
  ],
)
def test_own_rows_are_the_rows_of_local_devices(sharding, index, count):
  rows = own_rows(sharding, 24)
  assert rows == dict(process_index=index, process_count=count)


def test_own_rows_that_overlap_partly_raise():
  # Each of two processes has three devices, so one of the three pairs of
  # devices along the axis tensor belongs to both processes.
  with pytest.raises(ValueError, match="got sequences 8 to 23 of 24 for"):
    own_rows(Shards((8, 16), (16, 24), (16, 24)), 24)
