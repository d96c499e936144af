# SPDX-License-Identifier: Apache-2.0
"""Runs converted from and to optax, and resumed with another codec."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from coat_jax.optimizer import to_plain_state
from tests.matrices import quick
from tests.train.adam_states import assert_same_bytes, encoded, moments
from tests.train.runs import arguments, contents, losses, programs_on_disk, run
from train import convert, convert_adamw, step
from train.presets import demo
from train.run import checkpoint
from train.run.description import configuration
from train.run.directory import RunDirectory

# Compiles fast and stores moments without rounding.
PLAIN = dict(recipe="bf16", optim__codec="float32")


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
  with programs_on_disk(tmp_path_factory.mktemp("programs")):
    yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Trains for 8 steps with f32 moments; saves checkpoints 4 and 8."""
  out = tmp_path_factory.mktemp("runs") / "finished"
  assert run(out, **PLAIN) == 0
  return out


@pytest.fixture
def halfway(finished, tmp_path):
  """Returns a copy of the run as it was after 4 steps."""
  out = shutil.copytree(finished, tmp_path / "halfway")
  shutil.rmtree(out / "checkpoints" / "8")
  return out


@pytest.mark.slow
def test_run_resumes_with_another_codec_only_with_convert_state(
  finished, halfway, capsys
):
  options = dict(recipe="bf16", optim__codec="log8", eval_every=8)
  assert run(halfway, "--resume", **options) == 2
  errors = capsys.readouterr().err
  assert "optim.codec: float32 -> log8; pass --convert-state to" in errors
  assert run(halfway, "--resume", "--convert-state", **options) == 0
  errors = capsys.readouterr().err
  assert "resumed at step 4" in errors
  assert "optim.codec: float32 -> log8" in errors
  folder = RunDirectory(halfway)
  saved = checkpoint.read_description(folder.checkpoints, 8)
  for described in (saved, json.loads(folder.config.read_text())):
    assert described["config"]["optim"]["codec"] == "log8"
  # Step 5 of both runs has the same parameters; later losses depend on moments.
  before, after = losses(finished), losses(halfway)
  assert after[5, "loss"] == before[5, "loss"]
  assert after[8, "loss"] != before[8, "loss"]
  assert after[8, "loss"] == pytest.approx(before[8, "loss"], rel=1e-2)
  # After the conversion, the run resumes with or without --convert-state.
  assert run(halfway, "--resume", **options) == 0
  assert run(halfway, "--resume", "--convert-state", **options) == 0


def command(*words):
  return convert.main([str(word) for word in words])


@pytest.mark.slow
def test_exported_and_imported_run_resumes_bit_for_bit(
  finished, halfway, tmp_path, capsys
):
  exported, out = tmp_path / "adamw", tmp_path / "imported"
  assert command("export", halfway, exported) == 0
  assert "params and opt_state of step 4" in capsys.readouterr().err
  line = arguments(out, **PLAIN)
  assert command("import", exported, *line) == 0
  assert "--resume continues from step 4" in capsys.readouterr().err
  assert run(out, "--resume", **PLAIN) == 0
  # Leave out the state reports, whose exact moments start anew on import.
  before, after = losses(finished), losses(out)
  after = {key: x for key, x in after.items() if key[1] != "state"}
  assert {number for number, _ in after} == {5, 6, 7, 8}
  assert after == {key: before[key] for key in after}


def model_state(config):
  """Returns the abstract state of a run with this configuration."""
  return step.abstract_state(config, step.build_optimizer(config))


def described(path):
  """Returns the newest step of a run, and its configuration."""
  folder = RunDirectory(path)
  found, _ = checkpoint.newest_whole_step(folder.checkpoints)
  description = checkpoint.read_description(folder.checkpoints, found)
  return found, configuration(description)


def test_export_restores_into_the_state_of_optax_adamw(halfway, tmp_path):
  assert command("export", halfway, tmp_path / "adamw") == 0
  found, made = described(halfway)
  state = checkpoint.restore_state(
    RunDirectory(halfway).checkpoints, found, model_state(made)
  )
  # A user of optax who knows the parameters' shapes would write this.
  schedule = optax.cosine_decay_schedule(1e-3, 100)
  optimizer = optax.adamw(schedule, mask=step.decays)
  target = {
    "params": state.params,
    "opt_state": jax.eval_shape(optimizer.init, state.params),
  }
  with ocp.StandardCheckpointer() as checkpointer:
    tree = checkpointer.restore(tmp_path / "adamw", target)
  params, opt_state = tree["params"], tree["opt_state"]
  assert_same_bytes(params, state.params)
  assert_same_bytes(opt_state[0].mu, state.optimizer.mu.codes)
  assert_same_bytes(opt_state[0].nu, state.optimizer.nu.codes)
  assert opt_state[2].count == opt_state[0].count == 4
  update = jax.jit(optimizer.update)
  updates, opt_state = update(params, opt_state, params)
  assert opt_state[0].count == 5
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(updates))


@pytest.mark.slow
def test_exports_decode_moments(halfway, tmp_path):
  options = dict(recipe="bf16", optim__codec="log8", eval_every=8)
  assert run(halfway, "--resume", "--convert-state", **options) == 0
  assert command("export", halfway, tmp_path / "adamw") == 0
  found, made = described(halfway)
  state = checkpoint.restore_state(
    RunDirectory(halfway).checkpoints, found, model_state(made)
  )
  adam = jax.jit(to_plain_state)(state.optimizer)
  with ocp.StandardCheckpointer() as checkpointer:
    tree = checkpointer.restore(tmp_path / "adamw")
  assert_same_bytes(tree["opt_state"][0]["mu"], adam.mu)
  assert_same_bytes(tree["opt_state"][0]["nu"], adam.nu)


def imported(tmp_path, tree):
  """Imports a tree; returns the run's configuration and its state."""
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "adamw", tree)
  line = arguments(tmp_path / "run")
  assert command("import", tmp_path / "adamw", *line) == 0
  found, made = described(tmp_path / "run")
  path = RunDirectory(tmp_path / "run").checkpoints
  return made, checkpoint.restore_state(path, found, model_state(made))


@pytest.mark.parametrize(
  "optimizer, kind",
  quick(
    0,
    [
      (
        optax.chain(
          optax.clip_by_global_norm(1.0),
          optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
          optax.ema(0.9),
        ),
        jnp.bfloat16,
      ),
      (optax.adamw(1e-3), jnp.float32),
      (optax.inject_hyperparams(optax.adamw)(1e-3), jnp.float32),
    ],
  ),
)
def test_chain_with_one_adam_state_is_imported(
  finished, tmp_path, optimizer, kind
):
  params = model_state(described(finished)[1]).params
  params = jax.tree.map(lambda x: jnp.full(x.shape, 0.5), params)
  adam = moments(params)
  adam = adam._replace(mu=jax.tree.map(lambda m: m.astype(kind), adam.mu))
  opt_state = jax.tree.map(
    lambda x: adam if isinstance(x, optax.ScaleByAdamState) else x,
    optimizer.init(params),
    is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState),
  )
  made, state = imported(tmp_path, {"params": params, "opt_state": opt_state})
  assert int(state.step) == 3
  assert_same_bytes(state.params, params)
  adam = jax.tree.map(jnp.float32, adam)._replace(count=adam.count)
  assert_same_bytes(state.optimizer, encoded(adam, made))
  # The preset reports errors of its moments, so it also stores exact ones.
  assert_same_bytes(state.exact, adam)
  path = RunDirectory(tmp_path / "run").checkpoints / "3" / "data" / "metadata"
  assert json.loads(path.read_text()) == {"next_index": 3}


def test_import_replaces_a_run_only_when_asked(halfway, tmp_path, capsys):
  assert command("export", halfway, tmp_path / "adamw") == 0
  line = arguments(halfway, **PLAIN)
  assert command("import", tmp_path / "adamw", *line) == 2
  assert (
    "already contains a run; pass --overwrite to replace"
    in capsys.readouterr().err
  )
  before = contents(halfway)
  assert command("import", tmp_path / "adamw", *line, "--resume") == 2
  assert "import: --resume does not apply" in capsys.readouterr().err
  assert contents(halfway) == before
  assert command("import", tmp_path / "adamw", *line, "--overwrite") == 0


@pytest.mark.parametrize(
  "tree, words",
  [
    (None, "as an Orbax checkpoint"),
    (
      {"params": {"w": 1.0}},
      "expected params and one state of Adam in",
    ),
    (
      {"params": {"w": 1.0}, "opt_state": {"count": 1, "mu": 1.0, "nu": 1.0}},
      "of the run's model differ in ('embedding', (256, 64",
    ),
  ],
)
def test_import_rejects_other_checkpoints(tmp_path, capsys, tree, words):
  if tree is not None:
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(tmp_path / "in", jax.tree.map(np.asarray, tree))
  line = arguments(tmp_path / "run")
  assert command("import", tmp_path / "in", *line) == 2
  assert words in capsys.readouterr().err
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("optimizer", ["coat_lion", "coat_muon"])
def test_runs_of_other_optimizers_are_refused(
  tmp_path, monkeypatch, capsys, optimizer
):
  out, options = tmp_path / "run", dict(optim__optimizer=optimizer)
  line = arguments(out, "--no-report-state", **options)
  assert command("import", tmp_path / "in", *line) == 2
  words = f"optim.optimizer must be coat_adamw, got {optimizer}; "
  assert f"import: {words}leave" in capsys.readouterr().err
  assert not out.exists()
  made = dataclasses.replace(demo(), report_state=False)
  made = dataclasses.replace(made, optim=made.optim.with_optimizer(optimizer))
  monkeypatch.setattr(
    convert_adamw, "newest_checkpoint", lambda *_: (out, 8, made)
  )
  assert command("export", out, tmp_path / "out") == 2
  assert f"export: the run's {words}use export-hf" in capsys.readouterr().err


def test_export_needs_a_run_and_replaces_nothing(halfway, tmp_path, capsys):
  assert command("export", tmp_path / "none", tmp_path / "out") == 2
  assert "expected a run with a checkpoint in" in capsys.readouterr().err
  assert command("export", halfway, tmp_path) == 2
  assert f"{tmp_path} must not exist" in capsys.readouterr().err


def test_export_into_a_file_is_refused_at_once(halfway, tmp_path, capfd):
  (tmp_path / "file").write_text("mine")
  out = tmp_path / "file" / "deeper" / "out"
  assert command("export", halfway, out) == 2
  errors = capfd.readouterr().err
  assert (
    f"{out} must be in a folder, got the file {tmp_path / 'file'}" in errors
  )
  assert len(errors.splitlines()) == 1


def test_import_that_cannot_be_saved_leaves_no_run(
  halfway, tmp_path, monkeypatch, capfd
):
  def fail(folder):
    raise OSError(28, "No space left on device")

  assert command("export", halfway, tmp_path / "adamw") == 0
  monkeypatch.setattr(checkpoint.checksums, "write", fail)
  line = arguments(halfway, **PLAIN)
  assert command("import", tmp_path / "adamw", *line, "--overwrite") == 1
  errors = capfd.readouterr().err
  assert "No space left" in errors and "Traceback" not in errors
  assert not halfway.exists()
