# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of version 0.1.0: the next step gives that version's bytes.

But for codes that are rounded stochastically, for other random words are drawn
now: these are that version's or their neighbours.

What is stored, how it was made and what to do where an upgrade of JAX changes
its bytes is in tests/data/make_checkpoint_v0.py.
"""

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import SingleDeviceSharding

from coat_jax import coat_adamw, codecs
from tests.golden import DATA
from tests.train.runs import ROOT
from train.run.description import configuration

STORED = DATA / "checkpoint_v0"
# As in make_checkpoint_v0.py.
COMMAND = (
  "demo --out run --data.path text.txt --no-report-state --steps 3 "
  "--save-every 2 --eval-every 3 --eval-batches 1 --batch 2 --seq 16 "
  "--model.num-layers 2 --model.d-model 32 --model.d-ff 48 "
  "--model.num-heads 2 --model.num-kv-heads 1 --model.vocab-size 128 "
  "--optim.group-size 32 --optim.warmup 2"
)
CODECS = ("coat", "coat_e8m0", "log8", "fp8", "bfloat16")
# Bytes of sums and products would depend on the machine: on its vectors, on its
# number of cores, and on what a library for products finds there. Level 0 also
# compiles in half the time.
PINNED = {
  "xla_backend_optimization_level": 0,
  "xla_cpu_max_isa": "AVX2",
  "xla_cpu_multi_thread_eigen": False,
  "xla_cpu_experimental_ynn_fusion_type": "",
}

pytestmark = pytest.mark.skipif(
  platform.machine() not in ("x86_64", "AMD64"),
  reason="the stored bytes are those of x86-64",
)


def path_name(path):
  return jax.tree_util.keystr(path, simple=True, separator="/")


def bytes_by_path(tree):
  return {
    path_name(path): np.frombuffer(np.asarray(leaf).tobytes(), np.uint8)
    for path, leaf in jax.tree.leaves_with_path(tree)
  }


def assert_stored(tree, name):
  """The stored paths, in any order, with the stored bytes or codes next to."""
  actual, expected = bytes_by_path(tree), np.load(STORED / name)
  assert actual.keys() == set(expected)
  different = {
    path: f"{np.mean(x != expected[path]):.2%}"
    for path, x in actual.items()
    if not np.array_equal(x, expected[path])
    and not is_rounded_elsewhere(path, x, expected[path])
  }
  assert not different, f"bytes that differ, of {len(actual)} leaves"


def is_rounded_elsewhere(path, actual, expected) -> bool:
  """Whether codes are one apart where they differ, less than half of them.

  Moments of norms are f32 and not codes. Some CPUs add up a norm's gradient in
  another order, a few roundings of 2^-24 of the largest value.
  """
  if "_codes/" not in path:
    return False
  if path.endswith("norm/scale"):
    values = [x.view(np.float32) for x in (actual, expected)]
    apart = np.max(np.abs(values[0] - values[1]))
    return apart <= 2.0**-20 * np.max(np.abs(values[1]))
  places = [place_of_code(path, x) for x in (actual, expected)]
  apart = np.abs(places[0] - places[1])
  return np.max(apart) == 1 and np.mean(apart) < 0.5


def place_of_code(path, codes):
  """Codes, as bytes, in the order of their values."""
  if path.startswith("log8/"):
    return (codes.view(np.int8) if "/mu_" in path else codes).astype(np.int32)
  size = (codes & 0x7F).astype(np.int32)
  return np.where(codes & 0x80, -size, size)


@pytest.mark.slow
def test_next_step_of_a_stored_run_has_the_stored_bytes(tmp_path):
  run = shutil.copytree(STORED / "run", tmp_path / "run")
  shutil.copy(STORED / "text.txt", tmp_path)
  flags = [f"--{name}={value}" for name, value in PINNED.items()]
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": " ".join(flags),
  }
  command = [sys.executable, "-m", "train.pretrain", *COMMAND.split()]
  process = subprocess.run(
    [*command, "--resume"],
    cwd=tmp_path,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  assert process.returncode == 0, process.stdout
  assert "run: resumed at step 2" in process.stdout

  rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
  losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
  found = {"loss": np.float64(losses[3])}
  with ocp.StandardCheckpointer() as checkpointer:
    for item in ("params", "optimizer"):
      found[item] = checkpointer.restore(run / "checkpoints" / "3" / item)
  assert_stored(found, "run_step_3.npz")


def test_configuration_of_a_stored_run_can_be_read():
  description = json.loads((STORED / "run" / "config.json").read_text())
  values = dataclasses.asdict(configuration(description))
  for name, value in description["config"].items():
    changed = values[name]
    if isinstance(value, dict):
      changed = {key: values[name][key] for key in value}
    assert changed == value, name


def test_next_update_of_stored_states_has_the_stored_bytes():
  stored = np.load(STORED / "states_step_3.npz")

  def read(name):
    shapes = {"key": (2, 2, 136), "query": (2, 2, 136), "bias": (48,)}
    return jax.tree.map_with_path(
      lambda path, shape: jnp.asarray(
        stored[f"{name}/{path_name(path)}"].view(np.float32).reshape(shape)
      ),
      {"layers": [{"attention": shapes}]},
      is_leaf=lambda x: isinstance(x, tuple),
    )

  params, grads = read("params"), read("grads")
  optimizers = {
    name: optax.chain(
      optax.clip(0.25),
      coat_adamw(
        1e-3,
        codec=getattr(codecs, name)(),
        weight_decay=0.1,
        quantize_mask=lambda path, leaf: leaf.ndim > 1,
        seed=3,
      ),
    )
    for name in CODECS
  }
  device = SingleDeviceSharding(jax.devices()[0])
  abstract = {
    name: jax.eval_shape(optimizer.init, params)
    for name, optimizer in optimizers.items()
  }
  abstract = jax.tree.map(lambda x: x.update(sharding=device), abstract)
  with ocp.StandardCheckpointer() as checkpointer:
    states = checkpointer.restore(STORED / "states", abstract)

  found = {"params": params, "grads": grads}
  for name, state in states.items():
    update = jax.jit(optimizers[name].update, compiler_options=PINNED)
    updates, state = update(grads, state, params)
    found[name] = {"updates": updates, "state": state}
  assert_stored(found, "states_step_3.npz")
