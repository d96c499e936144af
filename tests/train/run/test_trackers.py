# SPDX-License-Identifier: Apache-2.0
"""Metrics in TensorBoard's event files and in Weights & Biases."""

import json
import struct
import sys
import types
from pathlib import Path

import jax
import pytest
from tensorboardX import crc32c
from tensorboardX.proto import event_pb2

from tests.train.runs import run
from train.presets import demo
from train.run import trackers
from train.run.metrics import MetricsLog, read_metrics

# These options compile fastest and do not change what is written.
CHEAP = dict(recipe="bf16", optim__codec="float32")


def events(folder):
  """Returns the events of all files in a folder, in TensorBoard's order.

  Each record of a file is a length, its checksum, bytes and their checksum.
  """
  found = []
  for path in sorted(Path(folder).glob("*.tfevents.*")):
    data = path.read_bytes()
    while data:
      (size,) = struct.unpack("<Q", data[:8])
      content = data[12 : 12 + size]
      (checksum,) = struct.unpack("<I", data[12 + size : 16 + size])
      crc = crc32c.crc32c(content)
      masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
      assert checksum == masked
      found.append(event_pb2.Event.FromString(content))
      data = data[16 + size :]
  return found


def series(folder):
  """Returns values by (step, name), except those replaced after resuming."""
  values = {}
  for event in events(folder):
    if event.session_log.status == event_pb2.SessionLog.START:
      values = {key: x for key, x in values.items() if key[0] < event.step}
    for value in event.summary.value:
      values[event.step, value.tag] = value.simple_value
  return values


def numbers(path):
  """Returns values by (step, name) from a metrics.jsonl."""
  return {
    (row["step"], name): pytest.approx(x, rel=1e-6)
    for row in read_metrics(path / "metrics.jsonl")
    for name, x in row.items()
    if name != "step" and isinstance(x, int | float)
  }


@pytest.mark.slow
def test_event_files_of_a_resumed_run_match_its_log(tmp_path):
  out = tmp_path / "run"
  assert run(out, "--tensorboard", steps=4, save_every=2, **CHEAP) == 0
  assert run(out, "--tensorboard", "--resume", steps=6, **CHEAP) == 0
  found = series(out / "tensorboard")
  assert found == numbers(out)
  assert {step for step, _ in found} == {1, 2, 3, 4, 5, 6}
  assert run(out, "--overwrite", steps=2, **CHEAP) == 0
  assert not (out / "tensorboard").exists()


def test_repeated_steps_replace_the_old_ones_in_event_files(tmp_path):
  for resumed_step, last in ((0, 5), (3, 4)):
    writer = trackers.TensorBoard(tmp_path, resumed_step=resumed_step)
    for step in range(resumed_step + 1, last + 1):
      writer.write(step, {"loss": float(10 * resumed_step + step)})
    writer.close()
    # Names contain the time in seconds, so both files may get the same name.
    (file,) = tmp_path.glob("events.*")
    file.rename(tmp_path / f"{resumed_step}.tfevents.x")
  assert series(tmp_path) == {
    (1, "loss"): 1,
    (2, "loss"): 2,
    (3, "loss"): 3,
    (4, "loss"): 34,
  }


@pytest.fixture
def wandb(monkeypatch):
  """Replaces wandb with a module that records its calls."""
  calls = []

  class Run:
    def log(self, values, step):
      calls.append((step, values))

    def finish(self):
      calls.append("finish")

  def init(**options):
    calls.append(options)
    return Run()

  module = types.ModuleType("wandb")
  module.init = init
  module.__spec__ = types.SimpleNamespace()
  monkeypatch.setitem(sys.modules, "wandb", module)
  return module, calls


def test_weights_and_biases_gets_the_numbers_and_continues_its_run(
  wandb, tmp_path
):
  _, calls = wandb
  description = {"config": {"steps": 3}}
  for resumed_step in (0, 2):
    tracker = trackers.WeightsAndBiases(tmp_path, "runs/a", description)
    log = MetricsLog(
      tmp_path / "metrics.jsonl", resumed_step=resumed_step, trackers=[tracker]
    )
    log.write(step=resumed_step + 1, loss=2.5, state={"w": {}}, lr=None)
    log.close()
  first, *rest = calls
  assert first["id"] == (tmp_path / "wandb" / "id").read_text()
  assert (first["resume"], first["name"]) == ("allow", "runs/a")
  assert first["config"] == {"steps": 3} and first["dir"] == str(tmp_path)
  assert rest == [
    (1, {"loss": 2.5}),
    "finish",
    first,
    (3, {"loss": 2.5}),
    "finish",
  ]


@pytest.mark.slow
def test_run_writes_only_to_requested_trackers(wandb, tmp_path, capsys):
  _, calls = wandb
  out = tmp_path / "run"
  asked = ("--tensorboard", "--wandb", "--profile", "1:1")
  assert run(out, *asked, steps=2, eval_batches=1, **CHEAP) == 0
  want = numbers(out)
  assert {(1, "loss"), (2, "held_out_loss"), (2, "step_bytes")} <= want.keys()
  assert series(out / "tensorboard") == want
  options, *written, last = calls
  assert json.dumps(options["config"]) and last == "finish"
  assert want == {
    (step, name): value
    for step, values in written
    for name, value in values.items()
  }
  (trace,) = (out / "profile").rglob("*.xplane.pb")
  assert f"{out / 'profile'}: wrote a trace" in capsys.readouterr().err
  data = jax.profiler.ProfileData.from_file(str(trace))
  assert any(line.events for plane in data.planes for line in plane.lines)
  asked_for_nothing = trackers.open_trackers(demo(), out, {}, resumed_step=0)
  assert asked_for_nothing == []


def test_refusal_of_weights_and_biases_is_reported(wandb, tmp_path):
  module, _ = wandb

  def refuse(**_):
    raise RuntimeError("no API key")

  module.init = refuse
  with pytest.raises(
    ValueError, match="start the run: no API key; run `wandb login`"
  ):
    trackers.WeightsAndBiases(tmp_path, "runs/a", {"config": {}})


@pytest.mark.parametrize("option", ["tensorboard", "wandb"])
def test_missing_package_is_named_before_anything_is_changed(
  option, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
  out = tmp_path / "run"
  assert run(out, f"--{option}") == 2
  assert f"error: {option}: the package" in capsys.readouterr().err
  assert not out.exists()
