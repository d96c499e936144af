# SPDX-License-Identifier: Apache-2.0
"""How `checkpoint_v0` was made, by the code of version 0.1.0; no test needs it.

  git worktree add /tmp/v0 51a73ef && cd /tmp/v0
  JAX_PLATFORMS=cpu PYTHONPATH=. python .../tests/data/make_checkpoint_v0.py

text.txt           what the model reads
run/               the folder of a run, after two steps
run_step_3.npz     its third step: the loss, parameters, optimizer state
states/            {codec: optimizer state} after two updates, by Orbax
states_step_3.npz  parameters, gradients, and the third update of each codec

`run` and `states` are made only where they are not there. The third steps are
made anew: after an upgrade of JAX that changes their bytes this command gives
the old code's bytes with the new JAX. Arrays are stored as bytes (uint8), so
that FP8 needs no type of its own.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

# The same flags as in tests/train/test_old_checkpoints.py, which says why.
os.environ["XLA_FLAGS"] = (
  "--xla_backend_optimization_level=0 --xla_cpu_max_isa=AVX2 "
  "--xla_cpu_multi_thread_eigen=false --xla_cpu_experimental_ynn_fusion_type="
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from coat_jax import coat_adamw, codecs

HERE = Path(__file__).parent.absolute() / "checkpoint_v0"
# Orbax writes into a checkpoint where it is.
WORK = Path("/tmp/checkpoint_v0")
COMMAND = (
  "demo --out run --data.path text.txt --no-report-state --steps 3 "
  "--save-every 2 --eval-every 3 --eval-batches 1 --batch 2 --seq 16 "
  "--model.num-layers 2 --model.d-model 32 --model.d-ff 48 "
  "--model.num-heads 2 --model.num-kv-heads 1 --model.vocab-size 128 "
  "--optim.group-size 32 --optim.warmup 2"
)
CODECS = ("coat", "coat_e8m0", "log8", "fp8", "bfloat16")


def train(*flags):
  """Runs the program where config.json then has relative paths."""
  environment = os.environ | {"PYTHONPATH": os.getcwd()}
  command = [sys.executable, "-m", "train.pretrain", *COMMAND.split(), *flags]
  subprocess.run(command, cwd=WORK, env=environment, check=True)


def make_run():
  """Three steps, of which the third is forgotten."""
  train()
  run = WORK / "run"
  shutil.rmtree(run / "checkpoints" / "3")
  (run / "plot.png").unlink()
  (run / "lock").unlink()  # It names the machine.
  metrics = run / "metrics.jsonl"
  rows = metrics.read_text().splitlines(keepends=True)
  metrics.write_text("".join(rows[:2]))
  shutil.move(run, HERE / "run")


def make_next_step():
  """The third step of a copy of `run`."""
  run = shutil.copytree(HERE / "run", WORK / "run")
  train("--resume")
  rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
  losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
  stored = {"loss": np.float64(losses[3])}
  with ocp.StandardCheckpointer() as checkpointer:
    for item in ("params", "optimizer"):
      stored[item] = checkpointer.restore(run / "checkpoints" / "3" / item)
  np.savez_compressed(HERE / "run_step_3.npz", **bytes_by_path(stored))


def bytes_by_path(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): np.frombuffer(
      np.asarray(leaf).tobytes(), np.uint8
    )
    for path, leaf in jax.tree.leaves_with_path(tree)
  }


def make_optimizer(name):
  return optax.chain(
    optax.clip(0.25),
    coat_adamw(
      1e-3,
      codec=getattr(codecs, name)(),
      weight_decay=0.1,
      quantize_mask=lambda path, leaf: leaf.ndim > 1,
      seed=3,
    ),
  )


def make_trees(count):
  """Parameters and gradients; `key` and `query` differ in their place alone."""
  rng = np.random.default_rng(0)

  def draw(*shape):
    # A group's magnitudes span many powers of two.
    size = np.exp2(rng.integers(-12, 1, shape))
    return jnp.asarray(rng.standard_normal(shape) * size, jnp.float32)

  def tree():
    shapes = {"key": (2, 2, 136), "query": (2, 2, 136), "bias": (48,)}
    attention = {name: draw(*shape) for name, shape in shapes.items()}
    return {"layers": [{"attention": attention}]}

  return [tree() for _ in range(count)]


def make_states():
  """States after two updates."""
  params, *grads = make_trees(3)
  states = {}
  for name in CODECS:
    optimizer = make_optimizer(name)
    state = jax.jit(optimizer.init)(params)
    for g in grads:
      state = jax.jit(optimizer.update)(g, state, params)[1]
    states[name] = state
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(WORK / "states", states)
  shutil.move(WORK / "states", HERE / "states")


def make_next_update():
  """The third update of `states`."""
  params, _, _, grads = make_trees(4)
  abstract = {
    name: jax.eval_shape(make_optimizer(name).init, params) for name in CODECS
  }
  with ocp.StandardCheckpointer() as checkpointer:
    states = checkpointer.restore(HERE / "states", abstract)
  stored = {"params": params, "grads": grads}
  for name, state in states.items():
    update = jax.jit(make_optimizer(name).update)
    stored[name] = dict(
      zip(("updates", "state"), update(grads, state, params), strict=True)
    )
  np.savez_compressed(HERE / "states_step_3.npz", **bytes_by_path(stored))


if __name__ == "__main__":
  WORK.mkdir()
  shutil.copy(HERE / "text.txt", WORK)
  if not (HERE / "run").exists():
    make_run()
  if not (HERE / "states").exists():
    make_states()
  make_next_step()
  make_next_update()
  shutil.rmtree(WORK)
