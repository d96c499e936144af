# SPDX-License-Identifier: Apache-2.0
"""Checks the results of the Python code in how-to pages."""

import os
import pathlib
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import tyro
import yaml
from flax import nnx
from jax import P

from coat_jax.numerics.formats import E4M3
from train import presets
from train.config import TrainConfig


def assert_shares(tree, *, parts: int, vector_parts: int = 1):
  """Checks that each device has its share of a tree's bytes, within 2 %.

  Args:
    tree: arrays on one mesh.
    parts: number of devices that share a matrix, codes or statistics.
    vector_parts: number of devices that share a vector; scalars are replicated.
  """
  arrays = jax.tree.leaves(tree)
  share = sum(
    x.nbytes / (parts if x.ndim > 1 else vector_parts if x.ndim else 1)
    for x in arrays
  )
  held = dict.fromkeys(jax.devices()[: len(arrays[0].sharding.device_set)], 0)
  for x in arrays:
    for shard in x.addressable_shards:
      held[shard.device] += shard.data.nbytes
  for device, size in held.items():
    assert abs(size / share - 1) <= 0.02, (device, size, share)


def assert_learns(losses):
  """Checks that the loss starts above 1.5, and falls by more than 70 %."""
  assert losses[0] > 1.5 and np.all(np.isfinite(losses))
  assert losses[-1] < 0.3 * losses[0]


def check_gemma(names):
  """Checks training of FP8 layers on 4 x 2 devices, with Gemma's shardings."""
  assert_learns(names["losses"])
  model, optimizer = names["model"], names["optimizer"]
  check_gemma_shares(model, optimizer)
  of_weight = model.layers[0].mlp.down_proj.kernel
  assert of_weight[...].sharding.spec == P("tensor", "fsdp")
  # The FP8 layers have the parameters of the layers that they replace.
  with jax.set_mesh(names["mesh"]):
    plain = nnx.eval_shape(
      lambda: names["Transformer"](names["Layers"](), rngs=nnx.Rngs(0))
    )
  shapes = lambda x: jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(x)))  # noqa: E731
  assert shapes(plain) == shapes(model)


def check_gemma_shares(model, optimizer):
  """Checks shardings; scales of norms are split over `tensor`."""
  assert_shares(nnx.state(model), parts=8, vector_parts=2)
  state = nnx.state(optimizer)
  assert_shares(state, parts=8, vector_parts=2)
  codes = [x for x in jax.tree.leaves(state) if x.dtype == E4M3]
  assert len(codes) == 2 * 7  # Matrices: attention 3, MLP 3, embedding 1.


def check_nanodo(names):
  """Checks training of FP8 layers on eight devices with nanodo's FSDP."""
  assert_learns(names["losses"])
  check_nanodo_shares(names["state"], encoded=5)


def check_nanodo_shares(state, *, encoded: int):
  """Checks shardings; nanodo replicates scales of norms."""
  assert_shares(state.params, parts=8)
  assert_shares(state.opt_state, parts=8)
  leaves = jax.tree.leaves(state.opt_state)
  assert sum(x.dtype == E4M3 for x in leaves) == 2 * encoded


def check_equinox(names, printed, text):
  """Checks that only matrices are encoded, and that FP8 outputs are close."""
  del printed, text
  assert_learns(names["losses"])
  moments = names["opt_state"][0]
  assert moments.mu.codes.up.weight.dtype == E4M3
  assert moments.mu.codes.up.bias.dtype == jnp.float32
  assert moments.mu.codes.norm.weight.dtype == jnp.float32
  # The original model computes nearly the same.
  x = names["x"]
  plain, fp8 = names["model"], names["FP8MLP"](names["model"])
  expected = jax.jit(lambda x: jax.vmap(jax.vmap(plain))(x))(x)
  actual = jax.jit(lambda x: fp8(x))(x.astype(jnp.bfloat16))
  error = jnp.linalg.norm(actual.astype(jnp.float32) - expected)
  error /= jnp.linalg.norm(expected)
  assert 0 < error < 0.06  # E4M3 changes a value by at most 1/16.


def check_pjit(names, printed, text):
  """Checks that the state is sharded like the parameters."""
  del printed, text
  assert_learns(names["losses"])
  assert_shares(names["state"]["params"], parts=8)
  assert_shares(names["state"]["optimizer"], parts=8)


def check_clusters(names, printed, text):
  """Checks the rows on each device, and the files for Slurm and Kubernetes."""
  del printed
  batch = names["batch"]
  assert batch.shape == (16, 128)
  assert batch.addressable_shards[0].data.shape == (2, 128)
  check_script(*_blocks(text, "sh"))
  (job,) = _blocks(text, "yaml")
  (hosts,) = yaml.safe_load(job)["spec"]["replicatedJobs"]
  spec = hosts["template"]["spec"]
  (container,) = spec["template"]["spec"]["containers"]
  variables = {x["name"]: x["value"] for x in container["env"]}
  assert variables["JAX_NUM_PROCESSES"] == str(spec["parallelism"])
  assert variables["JAX_COORDINATOR_ADDRESS"] == "llama-hosts-0-0.llama:1234"


def check_script(script, slurm):
  """Checks that the script resumes if there is a complete checkpoint."""
  subprocess.run(["bash", "-n"], input=slurm, text=True, check=True)
  pathlib.Path("train.sh").write_text(script.replace("/mnt/runs", "."))
  pathlib.Path("python").write_text('#!/bin/sh\necho "$@"\n')
  pathlib.Path("python").chmod(0o755)
  path = f"{pathlib.Path.cwd()}:{os.environ['PATH']}"
  for folder, flag in (
    ("nothing", "--overwrite"),
    ("checkpoints/500.orbax-checkpoint-tmp-7", "--overwrite"),
    ("checkpoints/500", "--resume"),
  ):
    pathlib.Path("llama", folder).mkdir(parents=True)
    command = subprocess.run(
      ["bash", "train.sh"],
      env=os.environ | {"PATH": path},
      capture_output=True,
      text=True,
      check=True,
    ).stdout.split()
    assert command[:3] == ["-m", "train.pretrain", "llama2_7b"]
    assert command[-1] == flag
    config = tyro.cli(
      tyro.conf.FlagCreatePairsOff[TrainConfig],
      args=command[3:],
      default=presets.llama2_7b(),
    )
    assert config.distributed and config.mesh_sizes["fsdp"] == 32


def _blocks(text, language):
  return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


# test_howto runs these pages, in several variants.
VARIED = ("docs/howto/gemma.md", "docs/howto/nanodo.md")
CHECKS = {
  "docs/howto/clusters.md": check_clusters,
  "docs/howto/equinox.md": check_equinox,
  "docs/howto/pjit.md": check_pjit,
}
