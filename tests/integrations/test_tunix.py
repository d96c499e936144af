# SPDX-License-Identifier: Apache-2.0
"""Trains a small model in Tunix with coat_jax's optimizers.

Needs Tunix; `make test-integrations` installs it.
"""

import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

from coat_jax import coat_adamw, coat_lion, coat_muon
from tests.integrations import trainers

pytest.importorskip("tunix", reason="needs Tunix: make test-integrations")

import orbax.checkpoint as ocp
from tunix.cli import config
from tunix.models.qwen3 import model as qwen3
from tunix.sft import peft_trainer, utils

from coat_jax.integrations import tunix

STEPS, SAVED = 20, 10
MODEL = qwen3.ModelConfig(
  num_layers=1,
  vocab_size=256,
  embed_dim=512,
  hidden_dim=2048,
  num_heads=4,
  num_kv_heads=4,
  head_dim=128,
  rope_theta=10_000,
  norm_eps=1e-6,
)


def mesh_of(fsdp, tensor):
  kinds = (AxisType.Auto,) * 2
  return jax.make_mesh((fsdp, tensor), ("fsdp", "tp"), axis_types=kinds)


@nnx.jit
def make_model():
  model = qwen3.Qwen3(MODEL, rngs=nnx.Rngs(0))
  state = nnx.state(model)
  specs = nnx.get_partition_spec(state)
  nnx.update(model, jax.lax.with_sharding_constraint(state, specs))
  return model


def inputs_of(batch):
  return {
    "input_tokens": batch.input_tokens,
    "input_mask": batch.input_mask,
    "positions": utils.build_positions_from_mask(batch.input_mask),
    "attention_mask": utils.make_causal_attn_mask(batch.input_mask),
  }


def train(mesh, folder, optimizer):
  """Trains to the last step; resumes if `folder` has a checkpoint."""
  options = ocp.CheckpointManagerOptions(save_interval_steps=SAVED)
  settings = peft_trainer.TrainingConfig(
    eval_every_n_steps=1000,
    max_steps=STEPS,
    checkpoint_root_directory=str(folder),
    checkpointing_options=options,
  )
  losses = {}
  with mesh:
    model = make_model()
    trainer = peft_trainer.PeftTrainer(model, optimizer, settings)
    first = trainer.train_steps
    log = trainer._log_metrics

    def log_metrics(loss, step=None, **others):
      losses[step] = float(loss)
      log(loss, step, **others)

    trainer._log_metrics = log_metrics
    trainer.with_gen_model_input_fn(inputs_of).train(
      [
        peft_trainer.TrainingInput(x, np.ones_like(x))
        for x in trainers.tokens(STEPS, batch=8, length=32)
      ]
    )
  trainer.close()
  return trainer, first, losses


def test_trainer_shards_saves_and_restores_on_another_mesh(tmp_path, capsys):
  optimizer = coat_adamw(3e-4)
  with jax.numpy_rank_promotion("allow"):
    runs = {"uninterrupted": train(mesh_of(4, 2), tmp_path / "a", optimizer)}
    shutil.rmtree(tmp_path / "a" / str(STEPS))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    runs["the same mesh"] = train(mesh_of(4, 2), tmp_path / "a", optimizer)
    runs["another mesh"] = train(mesh_of(2, 4), tmp_path / "b", optimizer)
  for name, (trainer, first, losses) in runs.items():
    assert first == (0 if name == "uninterrupted" else SAVED)
    assert sorted(losses) == list(range(first + 1, STEPS + 1))
    trainers.check_bytes(
      f"Tunix, {name}",
      nnx.state(trainer.optimizer, nnx.optimizer.OptState),
      nnx.state(trainer.model, nnx.Param),
      jax.devices(),
      capsys,
    )
  trainers.check_losses({name: run[2] for name, run in runs.items()}, capsys)


CONFIG = """
model_config: {model_name: qwen3, model_source: internal}
tokenizer_config: {tokenizer_type: sentencepiece, tokenizer_path: none}
optimizer_config: {}
"""


@pytest.mark.parametrize("make", [coat_adamw, coat_lion, coat_muon])
def test_command_line_makes_the_optimizer(make, tmp_path):
  tunix.register()
  path = tmp_path / "config.yaml"
  path.write_text(CONFIG)
  settings = dict(opt_type=make.__name__, learning_rate=0.5, weight_decay=0.25)
  arguments = [f"optimizer_config.{x}={y}" for x, y in settings.items()]
  hyperparameters = config.HyperParameters(["", str(path), *arguments])
  optimizer = hyperparameters.create_optimizer("optimizer_config")
  params = {"w": jax.random.normal(jax.random.key(0), (64, 128))}
  grads = jax.tree.map(jnp.cos, params)
  expected = optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(
    0.5, weight_decay=0.25
  )
  states = optimizer.init(params), expected.init(params)
  got, _ = optimizer.update(grads, states[0], params)
  want, _ = expected.update(grads, states[1], params)
  np.testing.assert_array_equal(got["w"], want["w"])
  assert any(x.dtype.itemsize == 1 for x in jax.tree.leaves(states[0]))


def test_module_registers_the_optimizers_and_runs_a_command(tmp_path):
  command = tmp_path / "command.py"
  command.write_text(
    "import optax, sys; print(optax.coat_adamw.__name__, sys.argv[1:])"
  )
  done = subprocess.run(
    [sys.executable, "-m", "coat_jax.integrations.tunix", "command", "a=1"],
    env={"PYTHONPATH": f"{tmp_path}:.", "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  assert done.stdout == "coat_adamw ['a=1']\n", done.stderr
