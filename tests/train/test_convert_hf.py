# SPDX-License-Identifier: Apache-2.0
"""Runs that begin with Hugging Face checkpoints, and their exports."""

import dataclasses
import json
import shutil
import signal
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from coat_jax.models import load_hf
from coat_jax.optimizer import split_weights
from tests.comparing import assert_same_bits
from tests.matrices import quick
from tests.models.hf.folders import DATA, copied, params_of, tensors_of
from tests.train.runs import contents, losses, programs_on_disk
from train import convert, pretrain, pretrained, step
from train.mesh import make_mesh
from train.presets import demo
from train.run import checkpoint
from train.run.directory import RunDirectory

OPTIONS = {
  "batch": 2,
  "seq": 32,
  "steps": 2,
  "eval-batches": 1,
  "recipe": "bf16",
  "optim.codec": "float32",
  "optim.warmup": 1,
}


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
  with programs_on_disk(tmp_path_factory.mktemp("programs")):
    yield


def options(out, *flags, **others):
  others = {name.replace("__", "."): x for name, x in others.items()}
  pairs = ((f"--{name}", x) for name, x in (OPTIONS | others).items())
  return ["--out", str(out), *(str(x) for pair in pairs for x in pair), *flags]


def command(*words):
  return convert.main([str(word) for word in words])


def train(out, *flags, preset="finetune", **others):
  return pretrain.main([preset, *options(out, *flags, **others)])


def test_imported_run_is_exported_unchanged(tmp_path, capsys):
  source = copied(tmp_path / "hf", cast=ml_dtypes.bfloat16, dtype="bfloat16")
  (source / "tokenizer.json").write_text("{}")
  run, out = tmp_path / "run", tmp_path / "out"
  assert command("import-hf", source, *options(run)) == 0
  assert "run: --resume continues from step 0" in capsys.readouterr().err
  shutil.move(source, tmp_path / "moved")  # The run does not need its source.
  assert command("export-hf", run, "--out", out) == 0
  assert "out: weights of step 0, for transformers" in capsys.readouterr().err
  found, want = tensors_of(out), tensors_of(tmp_path / "moved")
  assert_same_bits(found, want)
  names = {"config.json", "model.safetensors", "tokenizer.json"}
  assert {file.name for file in out.iterdir()} == names
  assert command("export-hf", run, "--out", out) == 2
  assert "out must not exist" in capsys.readouterr().err
  other = tmp_path / "f32"
  assert command("export-hf", run, "--out", other, "--dtype", "float32") == 0
  f32 = {name: x.astype(np.float32) for name, x in want.items()}
  assert_same_bits(tensors_of(other), f32)


@pytest.mark.slow
@pytest.mark.parametrize("params", ["float32", "bfloat16", "bfloat16_low8"])
def test_import_hf_and_init_from_give_the_same_run(params, tmp_path, capsys):
  source = DATA / "qwen2"
  kind = {"params": params}
  made, started = tmp_path / "made", tmp_path / "started"
  assert command("import-hf", source, *options(made, **kind)) == 0
  assert train(made, "--resume", **kind) == 0
  assert train(started, "--init-from", str(source), **kind) == 0
  assert losses(made) == losses(started)
  assert "2" in {f.name for f in (started / "checkpoints").iterdir()}
  # A resumed run keeps its model, whatever the preset, with or without
  # --init-from.
  for flags in ([], ["--init-from", str(source)]):
    assert train(started, "--resume", *flags, preset="demo_gpu", **kind) == 0
  out = tmp_path / "out"
  assert command("export-hf", started, "--out", out) == 0
  before, after = tensors_of(source), tensors_of(out)
  assert before.keys() == after.keys()
  for name, x in after.items():
    assert x.shape == before[name].shape and x.dtype == np.float32
    # Two steps with lr 2e-5 change weights by less than 1e-4. In BF16, each
    # step also rounds weights up or down.
    bound = 1e-4 + (2**-5 * np.abs(x) if params == "bfloat16" else 0)
    assert np.all(np.abs(x - before[name]) < bound)
    assert np.any(x != before[name])
  load_hf(out)


@pytest.mark.parametrize(
  "params, mesh",
  quick(
    0,
    [
      ("bfloat16_low8", "data=2,fsdp=2,tensor=2"),
      ("bfloat16_low8", ""),
      ("bfloat16", "data=2,fsdp=2,tensor=2"),
      ("float32", "data=2,fsdp=2,tensor=2"),
      ("float32", ""),
    ],
  ),
)
def test_weights_are_stored_in_the_dtype_of_the_run(params, mesh, tmp_path):
  config = demo_of(DATA / "qwen2", params=params, mesh=mesh)
  on_mesh = make_mesh(config.mesh_sizes)
  optimizer = step.build_optimizer(config, on_mesh)
  state = pretrained.initial_state(config, optimizer, on_mesh)
  dtype = jnp.bfloat16 if params == "bfloat16" else jnp.float32
  exact = params_of(load_hf(DATA / "qwen2", param_dtype=dtype))
  if params == "bfloat16_low8":
    high, low = split_weights(exact)
    assert_same_bits(state.params, high)
    assert_same_bits(state.optimizer.low, low)
  else:
    assert_same_bits(state.params, exact)
  abstract = step.abstract_state(config, optimizer, on_mesh)
  for x, want in zip(*map(jax.tree.leaves, (state, abstract)), strict=True):
    assert (x.shape, x.dtype) == (want.shape, want.dtype)
    if mesh:
      assert x.sharding.is_equivalent_to(want.sharding, x.ndim)


def demo_of(source, **others):
  config = dataclasses.replace(
    demo(), init_from=str(source), report_state=False, batch=8, **others
  )
  optim = dataclasses.replace(config.optim, codec="float32")
  return pretrained.with_shape(dataclasses.replace(config, optim=optim))


def test_runs_have_the_shape_of_the_checkpoint(tmp_path):
  config = demo_of(DATA / "qwen2")
  assert config.model == load_hf(DATA / "qwen2").config
  assert demo_of("").model == demo().model
  with pytest.raises(ValueError, match="tensor must divide num_kv_heads"):
    demo_of(DATA / "qwen2", mesh="tensor=4")
  # The preset's model could not be split over this mesh.
  folder = copied(tmp_path / "wide", num_key_value_heads=4)
  assert demo_of(folder, mesh="tensor=4", recipe="bf16").model.num_kv_heads == 4


def test_bad_checkpoints_are_refused_and_nothing_is_written(tmp_path, capsys):
  missing = copied(tmp_path / "missing", tensors={"model.norm.weight": None})
  other = copied(tmp_path / "other", model_type="gpt_neox")
  run = tmp_path / "run"
  for source, words in [
    (missing, "got no model.norm.weight; copy the whole checkpoint"),
    (other, "model_type must be one of llama"),
    (tmp_path / "none", "got nothing of that name"),
    (DATA / "llava", f"train.finetune {DATA / 'llava'} --data FILES --out RUN"),
    (DATA / "vit", "train.vit PRESET --data FOLDER"),
    (DATA / "siglip_vision", "expected a text-only model, got a vision tower"),
  ]:
    for make in (
      lambda source: command("import-hf", source, *options(run)),
      lambda source: train(run, "--init-from", str(source)),
    ):
      assert make(source) == 2
      error = capsys.readouterr().err.splitlines()[-1]
      assert error.startswith("error: ") and words in error
      assert "load_hf" not in error and "model=" not in error
      assert not run.exists()


def test_weights_that_are_not_finite_are_refused(tmp_path, capsys):
  nan = {"model.norm.weight": np.full(64, np.nan, np.float32)}
  source, run = copied(tmp_path / "nan", tensors=nan), tmp_path / "run"
  assert command("import-hf", source, *options(run)) == 2
  error = capsys.readouterr().err.splitlines()[-1]
  words = "must hold finite weights, got NaN or infinity in model.norm.weight;"
  assert error.startswith(f"error: {source / 'model.safetensors'} {words}")
  assert not run.exists()


def test_options_that_would_be_ignored_are_refused(tmp_path, capsys):
  run, source = tmp_path / "run", DATA / "llama"
  again = ["--init-from", str(source)]
  for status in (
    train(run, *again, **{"model.num-layers": 1}),
    command("import-hf", source, *options(run, *again)),
    command("import", source, "demo", *options(run, *again)),
    command("import-hf", source, *options(run, "--resume")),
  ):
    assert status == 2
    assert not run.exists()
  errors = capsys.readouterr().err
  assert (
    "leave these options out" in errors and errors.count("got --init-from") == 2
  )
  for op in ("import", "import-hf"):
    assert f"error: {op}: weights come from" in errors
  assert "error: import-hf: --resume does not apply" in errors


@pytest.mark.slow
def test_run_from_random_weights_is_exported(tmp_path, capsys):
  run, out = tmp_path / "run", tmp_path / "out"
  shape = {"num-layers": 1, "d-model": 32, "d-ff": 48, "num-heads": 2}
  shape = {f"model.{name}": x for name, x in shape.items()}
  shape |= {"model.num-kv-heads": 1, "steps": 1}
  assert train(run, preset="demo", **shape) == 0
  assert not RunDirectory(run).source.exists()
  assert command("export-hf", run, "--out", out) == 0
  config = load_hf(out).config
  assert (config.family, config.num_layers, config.d_model) == ("llama", 1, 32)
  written = json.loads((out / "config.json").read_text())
  assert written["dtype"] == "float32"
  assert written["max_position_embeddings"] == OPTIONS["seq"]


def test_export_that_cannot_be_written_is_reported(
  tmp_path, capsys, monkeypatch
):
  run, source = tmp_path / "run", DATA / "llama"
  assert command("import-hf", source, *options(run)) == 0
  assert command("import-hf", source, *options(run)) == 2
  assert "already contains a run; pass --overwrite" in capsys.readouterr().err
  before = contents(run)
  assert command("export-hf", run / "none", "--out", tmp_path / "out") == 2
  assert (
    "export-hf: expected a run with a checkpoint in" in capsys.readouterr().err
  )

  def full(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr("coat_jax.models.hf.save._write_file", full)
  assert command("export-hf", run, "--out", tmp_path / "out") == 1
  assert f"could not write {tmp_path / 'out'}: OSE" in capsys.readouterr().err
  assert not (tmp_path / "out").exists() and contents(run) == before
  assert command("import-hf", source, *options(run, "--overwrite")) == 0


def import_hf(run, *flags):
  """Imports the llama checkpoint; returns the exit status."""
  return command("import-hf", DATA / "llama", *options(run, *flags))


def fails(monkeypatch, name, act):
  """Replaces the function of this name with `act`."""
  monkeypatch.setattr(name, lambda *_, **__: act())


def full():
  raise OSError(28, "No space left on device")


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
  """Makes a run that tests only read."""
  run = tmp_path_factory.mktemp("runs") / "run"
  assert import_hf(run) == 0
  return run


def test_commands_that_fail_or_are_stopped_leave_nothing(
  imported, tmp_path, monkeypatch, capsys
):
  out = tmp_path / "out"
  make = ("import-hf", DATA / "llama", *options(out))
  export = ("export-hf", imported, "--out", out)
  copy, sums = "train.pretrained.carry", "train.run.checksums.write"
  stopped = f"stopped; {out} was not written, and unfinished files were removed"
  numbers = signal.SIGINT, signal.SIGTERM
  interrupt, terminate = (partial(signal.raise_signal, x) for x in numbers)
  handlers = [signal.getsignal(x) for x in numbers]
  for line, writer, act, status, words in (
    (make, copy, full, 1, f"error: save: could not write {out}: OSError"),
    (
      make,
      sums,
      full,
      1,
      f"error: save: could not write a checkpoint in {out}/check",
    ),
    (make, copy, terminate, 143, f"SIGTERM: {stopped}"),
    (make, sums, interrupt, 130, f"SIGINT: {stopped}"),
    (export, "coat_jax.models.hf.save.carry", interrupt, 130, "SIGINT: stop"),
  ):
    with monkeypatch.context() as patched:
      fails(patched, writer, act)
      assert command(*line) == status, words
    assert capsys.readouterr().err.splitlines()[-1].startswith(words)
    assert not list(tmp_path.iterdir()), words
  assert [signal.getsignal(x) for x in numbers] == handlers


def test_import_of_an_unreadable_checkpoint_keeps_the_old_run(
  tmp_path, monkeypatch
):
  run = tmp_path / "run"
  assert import_hf(run) == 0
  before = contents(run)
  with monkeypatch.context() as patched:
    fails(patched, "train.pretrained.load_params", full)
    assert import_hf(run, "--overwrite") == 2
  assert contents(run) == before


def test_leftovers_of_a_killed_command_are_named_or_replaced(
  imported, tmp_path, capsys
):
  out = tmp_path / "out"
  (tmp_path / "out.unfinished").mkdir()
  assert command("export-hf", imported, "--out", out) == 2
  said = capsys.readouterr().err
  unfinished = tmp_path / "out.unfinished"
  assert f"{unfinished} must not exist" in said
  assert f"if it was killed, remove {unfinished}" in said
  # A killed import leaves a described run with an unfinished checkpoint.
  run = shutil.copytree(imported, tmp_path / "run")
  (run / "checkpoints/0").rename(run / "checkpoints/0.orbax-checkpoint-tmp")
  assert import_hf(run) == 0
  assert checkpoint.newest_whole_step(RunDirectory(run).checkpoints) == (0, [])
  assert {x.name for x in run.iterdir()} == {x.name for x in imported.iterdir()}


def test_folders_before_dots_in_a_path_are_not_created(
  imported, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  assert command("export-hf", imported, "--out", "a/x/../../hf") == 0
  assert command("export", imported, "a/x/../../adamw") == 0
  assert import_hf("a/x/../../run") == 0
  names = {path.name for path in tmp_path.iterdir()}
  assert names == {"hf", "adamw", "run"}
