# SPDX-License-Identifier: Apache-2.0
"""Trains a small model in MaxText with coat_jax's optimizer and FP8 matmuls.

Needs MaxText with the patches coat_jax/integrations/maxtext_*.patch applied;
`make test-integrations` installs and patches it.
"""

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import jax
import pytest
from flax import nnx
from jax import P

from tests.integrations import trainers

pytest.importorskip("maxtext", reason="needs MaxText: make test-integrations")

import maxtext
from maxtext.trainers.pre_train import train

FOLDER = Path(maxtext.__file__).parent
OPTIONS = dict(
  run_name="run",
  hardware="cpu",
  skip_jax_distributed_system=True,
  enable_goodput_recording=False,
  dataset_type="synthetic",
  async_checkpointing=False,
  checkpoint_period=10,
  learning_rate_schedule_steps=20,
  learning_rate=1e-4,
  steps=20,
  opt_type="coat_adamw",
  attention="dot_product",
  dtype="float32",
  base_emb_dim=512,
  base_mlp_dim=1024,
  base_num_query_heads=4,
  base_num_kv_heads=4,
  base_num_decoder_layers=1,
  head_dim=128,
  vocab_size=256,
  max_target_length=32,
  per_device_batch_size=1,
)


def run(folder, **options):
  """Trains to the last step; resumes if `folder` has a checkpoint."""
  metrics = folder / "metrics"
  metrics.unlink(missing_ok=True)
  options = OPTIONS | options
  options |= dict(base_output_directory=folder, metrics_file=metrics)
  arguments = [f"{name}={value}" for name, value in options.items()]
  with jax.numpy_rank_promotion("allow"):
    settings, recorder = train.initialize(
      ["", str(FOLDER / "configs" / "base.yml"), *arguments]
    )
    state = train.train_loop(settings, recorder)
  lines = map(json.loads, metrics.read_text().splitlines())
  return state, {int(line["step"]): line["learning/loss"] for line in lines}


def check_bytes(name, state, capsys):
  _, params, _ = nnx.split(state.model, nnx.Param, ...)
  trainers.check_bytes(
    name, state.optimizer.opt_state, params, jax.devices(), capsys
  )


def mesh_options(fsdp, tensor):
  return dict(ici_fsdp_parallelism=fsdp, ici_tensor_parallelism=tensor)


def test_trainer_shards_saves_and_restores_on_another_mesh(tmp_path, capsys):
  first, second = tmp_path / "a", tmp_path / "b"
  first.mkdir()
  runs = {"uninterrupted": run(first, **mesh_options(4, 2))}
  shutil.rmtree(first / "run/checkpoints/19")
  shutil.copytree(first, second)
  runs["the same mesh"] = run(first, **mesh_options(4, 2))
  runs["another mesh"] = run(second, **mesh_options(2, 4))
  for name, (state, losses) in runs.items():
    # The checkpoint of step 10 was saved after that step, so 11 comes next.
    begin = 0 if name == "uninterrupted" else 11
    assert sorted(losses) == list(range(begin, 20))
    check_bytes(f"MaxText, {name}", state, capsys)
  trainers.check_losses({name: run[1] for name, run in runs.items()}, capsys)


def test_zero_1_shards_state_and_weights_over_data(tmp_path, capsys):
  state, losses = run(
    tmp_path,
    steps=3,
    enable_checkpointing=False,
    ici_data_parallelism=4,
    shard_optimizer_over_data=True,
    **mesh_options(1, 2),
  )
  check_bytes("MaxText, ZeRO-1", state, capsys)
  assert sorted(losses) == [0, 1, 2]
  # ZeRO-1 keeps weights sharded over "data" between steps, like the codes.
  kernel = state.model["decoder"]["layers"]["mlp"]["wi_0"]["kernel"]
  assert kernel.get_value().sharding.spec == P("data", None, "tensor")


@pytest.mark.parametrize("name", ["optimizer", "quantization"])
def test_patch_is_applied(name):
  """Checks that `patch --reverse` would succeed."""
  patch = files("coat_jax.integrations") / f"maxtext_{name}.patch"
  assert len(patch.read_text().splitlines()) <= 30
  subprocess.run(
    ["patch", "-p1", "--dry-run", "--reverse", "--force", "-i", str(patch)],
    cwd=FOLDER.parent,
    check=True,
  )


def test_quantization_changes_losses_by_less_than_5_percent(tmp_path):
  options = dict(steps=3, enable_checkpointing=False, **mesh_options(4, 2))
  _, exact = run(tmp_path, **options)
  _, fp8 = run(
    tmp_path, quantization="coat", use_qwix_quantization=True, **options
  )
  for step, loss in exact.items():
    assert 0 < abs(fp8[step] - loss) < 0.05 * loss
