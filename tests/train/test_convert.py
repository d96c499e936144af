# SPDX-License-Identifier: Apache-2.0
"""Runs that change their codec; states converted from and to optax."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import P
from jax.sharding import NamedSharding

from coat_jax import from_adam_state, sharding, to_adam_state
from tests.train.data.streams import numbered
from tests.train.runs import arguments, contents, losses, programs_on_disk, run
from train import convert, step
from train.mesh import make_mesh, parse_mesh
from train.presets import demo
from train.run import checkpoint
from train.run.checkpoint import Checkpoints
from train.run.description import configuration, describe
from train.run.directory import RunDirectory

# Compiles fast, and computes with what it keeps.
PLAIN = dict(recipe="bf16", optim__codec="float32")
SHAPES = {"up": (2, 64, 256), "down": (128, 64), "norm": (64,)}
SPECS = {"up": P(None, "fsdp", "tensor"), "down": P("fsdp"), "norm": P()}


def config(**optim):
  optim = dataclasses.replace(demo().optim, **optim)
  # Another seed than the default of what draws random words.
  return dataclasses.replace(demo(), optim=optim, seed=3, report_state=False)


def abstract_state(config, mesh=None):
  """Of a few leaves in place of the model's many."""
  init = step.build_optimizer(config).init
  params = {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in SHAPES.items()
  }
  make = lambda params: step.TrainState(jnp.int32(0), params, init(params), ())  # noqa: E731
  if mesh is None:
    return jax.eval_shape(make, params)
  where = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
  codec = config.optim.moment_codec()
  return sharding.abstract_state(make, params, where, codec=codec)


def moments(like):
  """Moments of Adam as they may be: over many orders of magnitude."""
  rng = np.random.default_rng(0)

  def draw(leaf):
    spread = np.exp(rng.normal(size=leaf.shape) * 2 - 7)
    return jnp.float32(spread * rng.choice([-1, 1], leaf.shape))

  mu = jax.tree.map(draw, like)
  nu = jax.tree.map(lambda m: jnp.square(m) * 1.5, mu)
  return optax.ScaleByAdamState(jnp.int32(3), mu, nu)


@functools.partial(jax.jit, static_argnames="config")
def encoded(adam, config):
  codec = config.optim.moment_codec()
  return from_adam_state(adam, codec=codec, seed=config.seed)


class Batches:
  def get_state(self):
    return {"next_index": 3}

  def set_state(self, state):
    assert state == {"next_index": 3}


def saved_state(path, config):
  """Saves a state of such moments; Adam's, as it reads once it is encoded."""
  abstract = abstract_state(config)
  codec = config.optim.moment_codec()
  params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), abstract.params)
  optimizer = encoded(moments(params), config)
  state = step.TrainState(jnp.int32(3), params, optimizer, ())
  checkpoints = Checkpoints(path, keep=3)
  checkpoints.save(3, state, Batches(), describe(config, numbered(1000)))
  checkpoints.close()
  return optimizer, jax.jit(lambda s: to_adam_state(s, codec))(optimizer)


def restored(path, config, mesh=None):
  checkpoints = Checkpoints(path, keep=3)
  abstract = abstract_state(config, mesh)
  state = convert.restore(checkpoints, 3, config, abstract, Batches())
  checkpoints.close()
  for leaf, want in zip(
    jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True
  ):
    assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype)
    assert mesh is None or leaf.sharding == want.sharding
  return state.optimizer


def assert_same_bytes(tree, other):
  assert jax.tree.structure(tree) == jax.tree.structure(other)
  names = step.leaf_names(tree)
  pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
  for name, (x, y) in zip(names, pairs, strict=True):
    assert x.dtype == y.dtype, name
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), name


@pytest.mark.parametrize(
  "before, now",
  [
    (dict(codec="log8", group_size=32), dict(codec="coat", second="e5m2")),
    (dict(codec="coat"), dict(codec="coat", group_size=64)),
    (dict(codec="coat"), dict(codec="coat", second="e5m2")),
    (dict(codec="float32"), dict(codec="coat", rounding="nearest")),
    (dict(codec="coat_e8m0"), dict(codec="bfloat16")),
    (dict(codec="coat"), dict(codec="float32")),
  ],
)
def test_moments_are_decoded_and_encoded_by_the_other_codec(
  tmp_path, before, now
):
  _, adam = saved_state(tmp_path, config(**before))
  after = config(**now)
  assert_same_bytes(restored(tmp_path, after), encoded(adam, after))


def test_codes_do_not_change_with_the_rounding(tmp_path):
  optimizer, _ = saved_state(tmp_path, config())
  after = config(rounding="nearest")
  assert_same_bytes(restored(tmp_path, after), optimizer)


def test_moments_on_a_mesh_are_converted_as_on_one_device(tmp_path):
  saved_state(tmp_path, config(codec="log8", group_size=32))
  after = config(codec="coat", group_size=16)
  expected = restored(tmp_path, after)
  mesh = make_mesh(parse_mesh("data=2,fsdp=2,tensor=2"))
  assert_same_bytes(restored(tmp_path, after, mesh), expected)


@pytest.mark.slow
def test_groups_that_do_not_fit_the_mesh_are_converted_whole(tmp_path):
  saved_state(tmp_path, config(codec="log8", group_size=96))
  after = config(codec="coat", group_size=16)
  expected = restored(tmp_path, after)
  mesh = make_mesh(parse_mesh("fsdp=4,tensor=2"))
  assert_same_bytes(restored(tmp_path, after, mesh), expected)
  with pytest.raises(ValueError, match="whole groups, got groups of 96"):
    restored(tmp_path, config(codec="coat", group_size=96), mesh)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
  with programs_on_disk(tmp_path_factory.mktemp("programs")):
    yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """A run of 8 steps with f32 moments and checkpoints of 4 and 8."""
  out = tmp_path_factory.mktemp("runs") / "finished"
  assert run(out, **PLAIN) == 0
  return out


@pytest.fixture
def halfway(finished, tmp_path):
  """The same, when it had done 4 steps."""
  out = shutil.copytree(finished, tmp_path / "halfway")
  shutil.rmtree(out / "checkpoints" / "8")
  return out


@pytest.mark.slow
def test_run_resumes_with_another_codec_when_asked(finished, halfway, capsys):
  options = dict(recipe="bf16", optim__codec="log8", eval_every=8)
  assert run(halfway, "--resume", **options) == 2
  errors = capsys.readouterr().err
  assert "got optim.codec: float32 -> log8; pass --convert-state to" in errors
  assert run(halfway, "--resume", "--convert-state", **options) == 0
  errors = capsys.readouterr().err
  assert "resumed at step 4" in errors
  assert "optim.codec: float32 -> log8" in errors
  folder = RunDirectory(halfway)
  saved = checkpoint.read_description(folder.checkpoints, 8)
  for described in (saved, json.loads(folder.config.read_text())):
    assert described["config"]["optim"]["codec"] == "log8"
  # The fifth loss is that of the same parameters; then moments count.
  before, after = losses(finished), losses(halfway)
  assert after[5, "loss"] == before[5, "loss"]
  assert after[8, "loss"] != before[8, "loss"]
  assert after[8, "loss"] == pytest.approx(before[8, "loss"], rel=1e-2)
  # It is a run like any other now, also with --convert-state once more.
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
  # But for its report: what it compares with begins anew.
  before, after = losses(finished), losses(out)
  after = {key: x for key, x in after.items() if key[1] != "state"}
  assert {number for number, _ in after} == {5, 6, 7, 8}
  assert after == {key: before[key] for key in after}


def model_state(config):
  """The abstract state of a run of `OPTIONS`."""
  return step.abstract_state(config, step.build_optimizer(config))


def described(path):
  """The newest step of a run, and its configuration."""
  folder = RunDirectory(path)
  found, _ = folder.newest_whole_step()
  description = checkpoint.read_description(folder.checkpoints, found)
  return found, configuration(description)


def test_exported_state_is_that_of_optax_adamw(halfway, tmp_path):
  assert command("export", halfway, tmp_path / "adamw") == 0
  found, made = described(halfway)
  state = checkpoint.restore_state(
    RunDirectory(halfway).checkpoints, found, model_state(made)
  )
  # What a user of optax writes, who has the parameters' shapes.
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
  assert_same_bytes(opt_state[0].mu, state.optimizer.mu_codes)
  assert_same_bytes(opt_state[0].nu, state.optimizer.nu_codes)
  assert opt_state[2].count == opt_state[0].count == 4
  update = jax.jit(optimizer.update)
  updates, opt_state = update(params, opt_state, params)
  assert opt_state[0].count == 5
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(updates))


@pytest.mark.slow
def test_encoded_moments_are_exported_decoded(halfway, tmp_path):
  options = dict(recipe="bf16", optim__codec="log8", eval_every=8)
  assert run(halfway, "--resume", "--convert-state", **options) == 0
  assert command("export", halfway, tmp_path / "adamw") == 0
  found, made = described(halfway)
  state = checkpoint.restore_state(
    RunDirectory(halfway).checkpoints, found, model_state(made)
  )
  codec = made.optim.moment_codec()
  adam = jax.jit(lambda s: to_adam_state(s, codec))(state.optimizer)
  with ocp.StandardCheckpointer() as checkpointer:
    tree = checkpointer.restore(tmp_path / "adamw")
  assert_same_bytes(tree["opt_state"][0]["mu"], adam.mu)
  assert_same_bytes(tree["opt_state"][0]["nu"], adam.nu)


def imported(tmp_path, tree):
  """Imports a tree; the run's configuration, and the state it has then."""
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "adamw", tree)
  line = arguments(tmp_path / "run")
  assert command("import", tmp_path / "adamw", *line) == 0
  found, made = described(tmp_path / "run")
  path = RunDirectory(tmp_path / "run").checkpoints
  return made, checkpoint.restore_state(path, found, model_state(made))


@pytest.mark.parametrize(
  "optimizer, kind",
  [
    (optax.adamw(1e-3), jnp.float32),
    (
      optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
        optax.ema(0.9),
      ),
      jnp.bfloat16,
    ),
    (optax.inject_hyperparams(optax.adamw)(1e-3), jnp.float32),
  ],
)
def test_chain_with_one_state_of_adam_is_imported(
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
  # The preset reports on its state, so it keeps the true one.
  assert_same_bytes(state.exact, adam)
  path = RunDirectory(tmp_path / "run").checkpoints / "3" / "data" / "metadata"
  assert json.loads(path.read_text()) == {"next_index": 3}


def test_import_replaces_a_run_only_when_asked(halfway, tmp_path, capsys):
  assert command("export", halfway, tmp_path / "adamw") == 0
  line = arguments(halfway, **PLAIN)
  assert command("import", tmp_path / "adamw", *line) == 2
  assert "holds a run; pass --overwrite to replace" in capsys.readouterr().err
  before = contents(halfway)
  assert command("import", tmp_path / "adamw", *line, "--resume") == 2
  assert "import: makes a run, got --resume; leave" in capsys.readouterr().err
  assert contents(halfway) == before
  assert command("import", tmp_path / "adamw", *line, "--overwrite") == 0


@pytest.mark.parametrize(
  "tree, words",
  [
    (None, "must be a checkpoint of Orbax, got"),
    ({"params": {"w": 1.0}}, "must hold params and one state of Adam, got par"),
    (
      {"params": {"w": 1.0}, "opt_state": {"count": 1, "mu": 1.0, "nu": 1.0}},
      r"params must be those of this model, got another ('embedding', (256, 64",
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


def test_export_needs_a_run_and_replaces_nothing(halfway, tmp_path, capsys):
  assert command("export", tmp_path / "none", tmp_path / "out") == 2
  assert "none must hold a run with a checkpoint" in capsys.readouterr().err
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


def test_import_that_cannot_be_saved_keeps_the_old_run(
  halfway, tmp_path, monkeypatch, capfd
):
  def fail(folder):
    raise OSError(28, "No space left on device")

  assert command("export", halfway, tmp_path / "adamw") == 0
  before = contents(halfway)
  monkeypatch.setattr(checkpoint.checksums, "write", fail)
  line = arguments(halfway, **PLAIN)
  assert command("import", tmp_path / "adamw", *line, "--overwrite") == 1
  errors = capfd.readouterr().err
  assert "No space left" in errors and "Traceback" not in errors
  assert contents(halfway) == before
