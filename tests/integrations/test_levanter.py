# SPDX-License-Identifier: Apache-2.0
"""Trains a small model in Levanter with coat_jax's optimizer.

Needs Levanter; `make test-integrations` installs it.
"""

import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.integrations import trainers

pytest.importorskip("levanter", reason="needs Levanter: make test-integrations")

import haliax
from haliax.partitioning import axis_mapping, named_jit
from levanter.checkpoint import CheckpointerConfig
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.optim.config import AdamConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.utils.mesh import MeshConfig

from coat_jax.integrations.levanter import CoatConfig
from coat_jax.optimizer.state import moments_in

STEPS, SAVED = 20, 10
MODEL = LlamaConfig(
  max_seq_len=32,
  hidden_dim=512,
  intermediate_dim=1024,
  num_layers=2,
  num_heads=4,
  num_kv_heads=4,
)
VOCAB = haliax.Axis("vocab", 256)
BATCH = haliax.Axis("batch", 8)


def settings_of(folder, data, tensor):
  return TrainerConfig(
    id="run",
    tracker=NoopConfig(),
    log_dir=folder / "logs",
    log_jaxprs=False,
    log_xla_hlo=False,
    require_accelerator=False,
    # By default Levanter splits the axis "mlp" over the mesh axis "model". In
    # parameters, we also split "embed" over "data".
    mesh=MeshConfig(
      axes={"data": data, "model": tensor},
      shared_mapping={"kv_head": "model"},
      param_mapping={"embed": "data", "vocab": "model"},
    ),
    train_batch_size=BATCH.size,
    num_train_steps=STEPS,
    checkpointer=CheckpointerConfig(
      base_path=str(folder), keep=[{"every": SAVED}]
    ),
  )


def batches():
  mask = LmExample.causal_loss_mask(MODEL.max_Pos).astype(jnp.float32)
  for x in trainers.tokens(STEPS, batch=BATCH.size, length=MODEL.max_seq_len):
    tokens = haliax.named(jnp.asarray(x), (BATCH, MODEL.max_Pos))
    yield LmExample(tokens=tokens, loss_weight=mask.broadcast_axis(BATCH))


def loss_of(model, example, *, key=None):
  return model.compute_next_token_loss(example, key=key)


def train(folder, data, tensor):
  """Trains to the last step; resumes if `folder` has a checkpoint."""
  settings = settings_of(folder, data, tensor)
  settings.initialize()
  optimizer = CoatConfig(learning_rate=3e-4).build(STEPS)
  losses = {}
  with Trainer(settings, optimizer, loss_of) as trainer:
    trainer.add_hook(lambda info: losses.update({info.step: info.loss}))
    key = jax.random.PRNGKey(0)
    state = trainer.initial_state(
      key, model_init=lambda: MODEL.build(VOCAB, key=key)
    )
    first = int(state.step)
    info = trainer.train(state, list(batches())[first:])
  return info.state, first, losses


def test_trainer_shards_saves_and_restores_on_another_mesh(tmp_path, capsys):
  first, same, other = (tmp_path / name for name in "abc")
  with jax.numpy_rank_promotion("allow"):
    runs = {"uninterrupted": train(first, 4, 2)}
    for folder in (same, other):
      shutil.copytree(first / "run" / f"step-{SAVED}", folder / "run" / "step")
    runs["the same mesh"] = train(same, 4, 2)
    runs["another mesh"] = train(other, 2, 4)
  for name, (state, begin, losses) in runs.items():
    # The checkpoint of step 10 was saved after that step, so 11 comes next.
    assert begin == (0 if name == "uninterrupted" else SAVED + 1)
    assert sorted(losses) == list(range(begin, STEPS))
    trainers.check_bytes(
      f"Levanter, {name}",
      state.opt_state,
      state.trainable_model,
      jax.devices(),
      capsys,
    )
  trainers.check_losses({name: run[2] for name, run in runs.items()}, capsys)


def step(config, params, grads):
  """Returns a first step's updates and state; "mlp" is split over 8 devices."""
  optimizer = config.build(2)
  mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
  with jax.set_mesh(mesh), axis_mapping({"mlp": "model"}):
    state = named_jit(optimizer.init)(params)
    return named_jit(optimizer.update)(grads, state, params)


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize(
  "columns, groups, spec",
  [(1024, ("mlp", 8), "model"), (512, ("mlp_groups", 4), None)],
)
def test_first_step_equals_adams_and_state_is_sharded(
  columns, groups, spec, limit
):
  axes = haliax.Axis("embed", 16), haliax.Axis("mlp", columns)
  w = haliax.random.normal(jax.random.key(0), axes)
  bias = haliax.ones(axes[1])
  params, grads = {"w": w, "bias": bias}, {"w": haliax.sin(w), "bias": bias}
  options = dict(
    learning_rate=0.5,
    weight_decay=0.25,
    beta1=0.8,
    beta2=0.9,
    epsilon=0.1,
    max_grad_norm=limit,
    warmup=0,
  )
  updates, state = step(CoatConfig(**options), params, grads)
  # The first update uses moments before they are encoded, so it equals Adam's.
  want, _ = step(AdamConfig(**options), params, grads)
  for name in params:
    assert updates[name].axes == params[name].axes
    np.testing.assert_allclose(
      updates[name].array, want[name].array, rtol=1e-5, atol=1e-6
    )
  for moment in moments_in(state):
    assert moment.codes["w"].array.dtype.itemsize == 1
    assert moment.codes["w"].array.sharding.spec[1] == "model"
    for x in (moment.amax["w"], moment.range["w"]):
      assert [(axis.name, axis.size) for axis in x.axes][1] == groups
      assert (*x.array.sharding.spec, None, None)[1] == spec
  assert state.hyperparams["learning_rate"] == 0.5


COMMAND = """
import dataclasses, draccus
from levanter.optim.config import OptimizerConfig

@dataclasses.dataclass
class Config:
  optimizer: OptimizerConfig

print(draccus.parse(Config).optimizer)
"""


def test_module_registers_the_optimizer_and_runs_a_command(tmp_path):
  (tmp_path / "command.py").write_text(COMMAND)
  arguments = ["--optimizer.type", "coat", "--optimizer.beta2", "0.5"]
  done = subprocess.run(
    [sys.executable, "-m", "coat_jax.integrations.levanter", "command"]
    + arguments,
    env={"PYTHONPATH": f"{tmp_path}:.", "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  assert done.stdout.startswith("CoatConfig("), done.stderr
  assert "beta2=0.5" in done.stdout
