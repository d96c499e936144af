# SPDX-License-Identifier: Apache-2.0
"""Measures the host memory needed to load and to save a checkpoint."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.models.hf.folders import ROOT, copied, write_index

D, F, LAYERS, VOCAB = 1024, 2816, 8, 8192
SHAPE = dict(
  hidden_size=D,
  intermediate_size=F,
  num_hidden_layers=LAYERS,
  num_attention_heads=16,
  num_key_value_heads=16,
  head_dim=64,
  vocab_size=VOCAB,
  dtype="bfloat16",
)
# This program runs in a new process, because the kernel counts peak memory per
# process. Its first round compiles and loads libraries.
PROGRAM = """
import sys, jax, jax.numpy as jnp, pathlib
from flax import nnx
jax.config.update("jax_num_cpu_devices", 8)
from coat_jax.models import load_hf, save_hf
from train.mesh import make_mesh, parse_mesh

def status(name):
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return next(int(x.split()[1]) for x in lines if x.startswith(name)) * 1024

folder, mesh, out = sys.argv[1:]
mesh = make_mesh(parse_mesh(mesh))
kept = []  # Otherwise the second round would reuse memory of the first.
for i in range(2):
  pathlib.Path("/proc/self/clear_refs").write_text("5")  # Reset the peak.
  before = status("VmRSS")
  kept.append(load_hf(folder, mesh=mesh, param_dtype=jnp.bfloat16))
  model = kept[-1]
  arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
  size = sum(x.nbytes for x in jax.block_until_ready(arrays))
  loaded = status("VmHWM") - before - size
  pathlib.Path("/proc/self/clear_refs").write_text("5")
  before = status("VmRSS")
  save_hf(model, f"{out}{i}", like=folder, max_shard_size=10**8)
  saved = status("VmHWM") - before
print(size, loaded, saved)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  """Writes a checkpoint of 240 MB in bfloat16, in shards."""
  folder = copied(tmp_path_factory.mktemp("memory") / "m", **SHAPE)
  (folder / "model.safetensors").unlink()
  rng, places = np.random.default_rng(0), {}

  def tensor(*shape):
    bits = rng.integers(0, 2**14, shape, np.uint16)
    return bits.view(jnp.bfloat16)

  def write(file, **tensors):
    named = {name.replace("__", "."): x for name, x in tensors.items()}
    save_file(named, folder / file)
    places.update(dict.fromkeys(named, file))

  ends = {"model__embed_tokens__weight": tensor(VOCAB, D)}
  ends |= {
    "lm_head__weight": tensor(VOCAB, D),
    "model__norm__weight": tensor(D),
  }
  write("ends.safetensors", **ends)
  for i in range(LAYERS):
    layer = {f"self_attn__{x}_proj": (D, D) for x in "qkvo"}
    layer |= {f"mlp__{x}_proj": (F, D) for x in ("gate", "up")}
    layer |= {"mlp__down_proj": (D, F), "input_layernorm": (D,)}
    layer |= {"post_attention_layernorm": (D,)}
    named = {
      f"model__layers__{i}__{name}__weight": tensor(*shape)
      for name, shape in layer.items()
    }
    write(f"layer-{i}.safetensors", **named)
  write_index(folder, places)
  return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("mesh", ["", "fsdp=4,tensor=2"])
def test_host_memory_holds_only_a_few_tensors(mesh, checkpoint, tmp_path):
  ran = subprocess.run(
    [sys.executable, "-c", PROGRAM, checkpoint, mesh, tmp_path / "out"],
    cwd=ROOT,
    # Return freed memory at once, or the second round would reuse it.
    env={
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "MALLOC_MMAP_THRESHOLD_": "1000000",
    },
    capture_output=True,
    text=True,
  )
  assert ran.returncode == 0, ran.stderr
  size, loaded, saved = map(int, ran.stdout.split())
  assert size > 200e6
  largest = 2 * D * VOCAB  # 17 MB; the stack of gate and up takes 92 MB.
  # At most, memory holds the file's pages of one tensor, a copy of them, and
  # the packed tensor.
  assert loaded < 4 * largest, json.dumps([size, loaded, saved])
  assert saved < 4 * largest, json.dumps([size, loaded, saved])
