# SPDX-License-Identifier: Apache-2.0
"""Image classifiers train with each option and on a mesh."""

import dataclasses

import numpy as np
import pytest

from tests.train.steps import Trained
from tests.train.test_vit import config_of
from train.vit_config import vit_digits


def _few_steps(**options):
  """Trains a tower of two layers for five steps on one batch."""
  draw = np.random.default_rng(0)
  rows = {
    "images": draw.normal(size=(8, 3, 8, 8)).astype(np.float32),
    "labels": np.array([0, 1, 2, 3, 0, 1, 2, 3], np.int32),
  }
  config = config_of("unused")
  # The number of classes normally comes from the data.
  model = dataclasses.replace(config.model, num_layers=2, num_classes=4)
  optim = options.pop("optim", {})
  optim = config.optim.with_optimizer(
    optim.pop("optimizer", "coat_adamw"),
    **dict(warmup=0, lr=3e-3, group_size=16) | optim,
  )
  config = dataclasses.replace(config, model=model, optim=optim, **options)
  return Trained(config, rows).run()


@pytest.mark.slow
@pytest.mark.parametrize(
  "options",
  [
    # Each case covers several options, because compiling a step is slow.
    dict(optim=dict(optimizer="coat_muon"), params="bfloat16", remat="fp8"),
    dict(
      optim=dict(optimizer="coat_lion", lr=3e-4),
      params="bfloat16_low8",
      remat="dots",
    ),
    dict(optim=dict(codec="log8"), remat="fp8_layer"),
    dict(params="bfloat16_low8", recipe="fp8_linear", remat="full"),
  ],
  ids=str,
)
def test_towers_train_with_each_option(options):
  found = _few_steps(**options).losses
  assert np.isfinite(found).all() and found[-1] < found[0] - 0.03


@pytest.mark.slow
def test_recomputation_changes_no_loss_of_a_tower():
  none, full = (_few_steps(remat=kept).losses for kept in ("none", "full"))
  np.testing.assert_allclose(full, none, atol=2e-3)


@pytest.mark.slow
def test_losses_on_a_mesh_equal_those_on_one_device(tmp_path):
  draw = np.random.default_rng(0)
  rows = {
    "images": draw.normal(size=(8, 3, 12, 12)).astype(np.float32),
    "labels": np.array([0, 1, 2, 3, 0, 1, 2, 3], np.int32),
  }
  config = config_of("unused", recipe="bf16", compute="float32")
  model = dataclasses.replace(
    config.model, image_size=12, num_classes=4, num_layers=1
  )
  optim = dataclasses.replace(config.optim, codec="float32", warmup=0, lr=1e-2)
  config = dataclasses.replace(config, model=model, optim=optim, steps=20)
  one = Trained(config, rows).run()
  several = Trained(
    dataclasses.replace(
      config, mesh="data=2,fsdp=2,tensor=2", accumulate=2, batch=8
    ),
    rows,
  ).run()
  assert one.losses[-1] < one.losses[0] - 0.1
  np.testing.assert_allclose(several.losses, one.losses, rtol=1e-5)


def test_fp8_experts_are_refused():
  with pytest.raises(ValueError, match="experts fp8 needs a mixture"):
    dataclasses.replace(vit_digits(), recipe="coat", experts="fp8")
