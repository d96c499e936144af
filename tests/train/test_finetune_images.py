# SPDX-License-Identifier: Apache-2.0
"""`python -m train.finetune` on a vision-language model, in two stages."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.interpreters import partial_eval as pe

from coat_jax import recipes
from coat_jax.models import Batch, VisionLanguageModel, load_hf, loss_fn
from coat_jax.optimizer import LowBitsState
from tests.models.hf.folders import tensors_of
from tests.train import llava
from tests.train.llava import config_of, run
from tests.train.runs import losses, programs_on_disk
from train import convert, step, weights
from train.config import resume_rule
from train.conversations import load
from train.finetune_config import FinetuneConfig
from train.optim_config import OptimConfig
from train.run.description import configuration, describe
from train.run.directory import RunDirectory
from train.source import decoder_of, open_source

PARTS = ("tower", "projector", "decoder")
TRAINED = {
  "projector": ("projector",),
  "decoder": ("projector", "decoder"),
  "all": PARTS,
}
PREFIXES = dict(
  zip(
    PARTS,
    ("vision_tower", "multi_modal_projector", "language_model"),
    strict=True,
  )
)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
  with programs_on_disk(tmp_path_factory.mktemp("programs")):
    yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return llava.make(tmp_path_factory.mktemp("shapes"))


def test_frozen_parts_have_no_state(folder):
  for (trained, parts), params in zip(
    TRAINED.items(), ("float32", "bfloat16_low8", "bfloat16"), strict=True
  ):
    config = config_of(
      folder,
      trained=trained,
      params=params,
      optim=OptimConfig(lr=1e-3, warmup=1, group_size=16, clip="share"),
      report_state=True,
    )
    state = step.abstract_state(config, step.build_optimizer(config))
    assert state.params.keys() == {*PARTS}
    adam = state.optimizer
    if params == "bfloat16_low8":
      assert adam.low.keys() == {*parts}
      adam = adam.inner
    for tree in (adam.mu.codes, adam.nu.codes, state.exact.mu, state.clip.own):
      assert tree.keys() == {*parts}
    # Trained and frozen parts store their weights in the same dtype.
    dtype = "float32" if params == "float32" else "bfloat16"
    for part in PARTS:
      kernels = [
        x.dtype
        for path, x in jax.tree.leaves_with_path(state.params[part])
        if "kernel" in jax.tree_util.keystr(path)
      ]
      assert {*kernels} == {jnp.dtype(dtype)}


def test_clipping_has_a_gradient_norm_for_each_layer(folder):
  config = config_of(
    folder,
    trained="all",
    optim=OptimConfig(lr=1e-3, warmup=1, group_size=16, clip="share"),
  )
  optimizer = step.build_optimizer(config)
  state = step.abstract_state(config, optimizer)
  norms = jax.tree.leaves(state.clip.own)
  shapes = dict(zip(step.leaf_names(state.params), norms, strict=True))
  # The tower and the decoder have a stack of two layers each.
  of_layers = {name for name, x in shapes.items() if x.shape == (2,)}
  assert of_layers == {name for name in shapes if "/layers/" in name}
  assert {name.split("/")[0] for name in of_layers} == {"tower", "decoder"}
  assert all(shapes[name].shape == () for name in shapes.keys() - of_layers)
  # A step keeps the shapes of these norms.
  rows = load(config)[1].batch_shapes(config)
  run = step.train_step(config, step.build_graph(config), optimizer)
  assert jax.eval_shape(run, state, rows)[0].clip == state.clip


def test_only_trained_parts_keep_low_bytes():
  draw = np.random.default_rng(0)
  whole = {
    name: {"kernel": jnp.asarray(draw.normal(size=(8, 16)), jnp.float32)}
    for name in ("own", "frozen")
  }

  def draw_params(store):
    return jax.tree.map(lambda x: store("kernel", x), whole)

  def with_moments(params):
    zeros = {"own": jax.tree.map(lambda x: x.astype("int8") * 0, params["own"])}
    low = LowBitsState(zeros, ())
    return step.TrainState(jnp.int32(0), params, low, (), ())

  state = weights.draw("bfloat16_low8", draw_params, with_moments)
  assert state.optimizer.low.keys() == {"own"}
  found = weights.load(state.params, state.optimizer.low)
  exact = {name: x["kernel"] for name, x in whole.items()}
  # Frozen parts have 8 bits of mantissa, trained ones 16.
  frozen = found["frozen"]["kernel"]
  np.testing.assert_array_equal(frozen, frozen.astype("bfloat16"))
  np.testing.assert_allclose(frozen, exact["frozen"], rtol=2**-8)
  np.testing.assert_allclose(found["own"]["kernel"], exact["own"], rtol=2**-16)
  assert (found["own"]["kernel"] != exact["own"].astype("bfloat16")).any()


def first_step(start, config, rows):
  """Returns the loss and gradient norm of a run's first step, in plain JAX."""
  model = load_hf(start, recipe=recipes.bf16(), dtype="float32")
  graph, params = nnx.split(model, nnx.Param)
  params = nnx.to_pure_dict(params)
  own = {name: params[name] for name in TRAINED[config.trained]}
  rows = jax.tree.map(jnp.asarray, dict(rows))

  @jax.jit
  @jax.value_and_grad
  def loss(own):
    batch = Batch.make(rows["tokens"], rows["segments"], rows["is_target"])
    return loss_fn(nnx.merge(graph, params | own), batch, rows["images"])

  value, grads = loss(own)
  return float(value), float(optax.tree.norm(grads))


@pytest.fixture(scope="module")
def projected(folder, tmp_path_factory):
  """Trains only the projector, in FP8; tests do not change the run."""
  llava.add_weights(folder / "llava")
  out = tmp_path_factory.mktemp("runs") / "projected"
  data = folder / "shapes.json"
  assert run(folder / "llava", data, out, trained="projector") == 0
  return out


def products(text, name, result):
  """Returns the result shapes of a program's matmuls, with sorted axes."""
  found = re.findall(rf"{result}\w+\[([\d,]+)\]\S* {name}[(\[]", text)
  return {tuple(sorted(map(int, x.split(",")))) for x in found}


# Shapes of weight gradients in the tower, and in the decoder with its head.
TOWER = {(48, 144), (48, 192), (48, 48)}
DECODER = {(64, 176), (64, 352), (64, 80)}


@pytest.mark.parametrize(
  "trained, absent, present",
  [
    ("projector", TOWER | DECODER, {(48, 64), (64, 64)}),
    pytest.param("decoder", TOWER, DECODER, marks=pytest.mark.slow),
    ("all", set(), TOWER | DECODER),
  ],
)
def test_frozen_parts_have_no_gradients(folder, trained, absent, present):
  config = config_of(folder, trained=trained)
  optimizer = step.build_optimizer(config)
  state = step.abstract_state(config, optimizer)
  rows = load(config)[1].batch_shapes(config)
  train_step = step.train_step(config, step.build_graph(config), optimizer)
  traced = jax.make_jaxpr(train_step)(state, rows).jaxpr
  # Remove what no result depends on, as the compiler does.
  used, _ = pe.dce_jaxpr(traced, [True] * len(traced.outvars))
  found = products(str(used), "= dot_general", ":")
  assert present <= found and not absent & found


@pytest.mark.slow
def test_compiled_projector_run_has_no_gradients_of_other_parts(projected):
  # The run compiled this program, so it comes from the cache.
  config = configuration(json.loads((projected / "config.json").read_text()))
  rows = load(config)[1].batch_shapes(config)
  optimizer = step.build_optimizer(config)
  state = step.abstract_state(config, optimizer)
  train_step = step.train_step(config, step.build_graph(config), optimizer)
  program = step.compile_on(None, train_step, state, rows, updates=True)
  found = products(program.as_text(), "dot", "= ")
  assert {(48, 64), (64, 64)} <= found
  assert not (TOWER | DECODER) & found


def exported(run, target):
  assert convert.main(["export-hf", str(run), "--out", str(target)]) == 0
  return tensors_of(target)


def parts_that_differ(a, b):
  assert a.keys() == b.keys()
  return {
    part
    for part, prefix in PREFIXES.items()
    for name in a
    if name.startswith(prefix) and not np.array_equal(a[name], b[name])
  }


@pytest.mark.slow
def test_each_stage_changes_only_its_parts(projected, folder, tmp_path, capsys):
  first = exported(projected, tmp_path / "first")
  before = tensors_of(folder / "llava")
  assert parts_that_differ(first, before) == {"projector"}
  for name in (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    "preprocessor_config.json",
  ):
    kept = (folder / "llava" / name).read_bytes()
    assert (tmp_path / "first" / name).read_bytes() == kept
  keys = json.loads((tmp_path / "first" / "config.json").read_text())
  assert keys["architectures"] == ["LlavaForConditionalGeneration"]
  assert keys["image_token_index"] == 0 and keys["image_seq_length"] == 16
  # The second stage starts from the run, on a mesh with microbatches. The
  # oracle in plain JAX starts from the exported folder.
  plain = {"recipe": "bf16", "compute": "float32", "optim.codec": "float32"}
  plain |= {"optim.group-size": None, "batch": 16, "steps": 2, "held-out": 0.1}
  plain |= {"optim.grad-clip": 1e9}
  data = folder / "shapes.json"
  out = tmp_path / "second"
  flags = dict(mesh="data=4,fsdp=2", accumulate=2)
  assert run(projected, data, out, **plain, **flags) == 0
  assert "M are trained" in capsys.readouterr().err
  config = config_of(folder, batch=16)
  own = dataclasses.replace(config.data, held_out=0.1)
  config, source = load(dataclasses.replace(config, data=own))
  rows = next(source.train_batches(config, process_index=0, process_count=1))
  assert rows["images"].any() and 1 < rows["segments"].max()
  loss, norm = first_step(tmp_path / "first", config, rows)
  found = losses(out)
  # The order of f32 sums over devices and microbatches differs.
  assert found[1, "loss"] == pytest.approx(loss, rel=1e-5)
  assert found[1, "grad_norm"] == pytest.approx(norm, rel=1e-4)
  second = exported(out, tmp_path / "out")
  assert parts_that_differ(second, first) == {"projector", "decoder"}
  # The run can be read as a whole model, or its decoder as a text model.
  opened = open_source(out)
  assert opened.config == config.model and opened.family == "llava"
  assert (opened.files / "preprocessor_config.json").is_file()
  model = opened.load()
  assert isinstance(model, VisionLanguageModel)
  kernel = model.decoder.layers.mlp.down.kernel[...]
  name = "language_model.model.layers.1.mlp.down_proj.weight"
  np.testing.assert_array_equal(kernel[1].T, second[name])
  assert decoder_of(opened.load()).config == config.model.text


@pytest.mark.slow
def test_killed_run_resumes_bit_for_bit(projected, folder, tmp_path, capsys):
  out = tmp_path / "copy"
  shutil.copytree(projected, out)
  before = losses(out)
  shutil.rmtree(out / "checkpoints" / "4")  # As if killed before step 4.
  data = folder / "shapes.json"
  # A resumed run does not need the model that it began with.
  start = folder / "gone"
  assert run(start, data, out, "--resume", trained="projector") == 0
  assert "resumed at step 2" in capsys.readouterr().err
  assert losses(out) == before
  # A resumed run must train the same parts.
  assert run(start, data, out, "--resume", trained="decoder", steps=6) == 2
  assert "trained: projector -> decoder" in capsys.readouterr().err


@pytest.mark.slow
def test_image_damaged_after_its_header_ends_the_run_when_read(
  projected, folder, tmp_path, capsys
):
  rows = json.loads((folder / "shapes.json").read_text())
  shutil.copytree(folder / "images", tmp_path / "images")
  for file in (tmp_path / "images").iterdir():
    file.write_bytes(file.read_bytes()[:-40])
  data, out = tmp_path / "shapes.json", tmp_path / "run"
  data.write_text("\n".join(map(json.dumps, rows)))
  assert run(projected, data, out, trained="projector") == 2
  errors = capsys.readouterr().err
  assert re.search(
    r"shapes\.json line \d+: Pillow cannot read the image", errors
  )
  assert "Traceback" not in errors
  assert RunDirectory(out).latest_step() is None
  # Once the images are repaired, the same command works.
  shutil.rmtree(tmp_path / "images")
  shutil.copytree(folder / "images", tmp_path / "images")
  assert run(projected, data, out, trained="projector") == 0


def test_description_and_resume_rules_cover_the_whole_model(folder):
  config, source = load(config_of(folder))
  description = json.loads(json.dumps(describe(config, source)))
  again = configuration(description)
  assert again.model == config.model and isinstance(again, FinetuneConfig)
  assert resume_rule("model.vision.d_ff", FinetuneConfig) == "fixed"
  assert resume_rule("trained", FinetuneConfig) == "fixed"
  assert resume_rule("data.images", FinetuneConfig) == "silent"
  # Samples answer only prompts without images.
  prompts = [*source._prompts()]
  assert prompts and all(0 not in prompt.tokens for prompt in prompts)
