# SPDX-License-Identifier: Apache-2.0
"""Learning rates match the formulas, which are written in NumPy here."""

import dataclasses

import numpy as np
import pytest

from train.config import OptimConfig
from train.optimizers import learning_rate
from train.presets import demo

STEPS, PEAK, END = 80, 2.0, 0.1


def wanted(schedule, warmup):
  """Returns the rates of updates 0 to STEPS, where the schedule ends."""
  i = np.arange(STEPS + 1)
  done = np.clip((i - warmup) / (STEPS - warmup), 0, 1)
  if schedule == "cosine":
    share = (1 + np.cos(np.pi * done)) / 2
  else:
    share = 1 - done
  falling = PEAK * (END + (1 - END) * share)
  # The first rate is not 0 but 1 / warmup of the peak.
  return np.where(i < warmup, PEAK * (i + 1) / max(warmup, 1), falling)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize(
  "warmup, in_steps", [(0, 0), (1, 1), (8, 8), (0.25, 20)]
)
def test_learning_rate_follows_the_formula(schedule, warmup, in_steps):
  optim = OptimConfig(
    lr=PEAK, schedule=schedule, warmup=warmup, min_lr_ratio=END
  )
  config = dataclasses.replace(demo(), steps=STEPS, optim=optim)
  assert optim.warmup_steps(STEPS) == in_steps
  rate = learning_rate(config)
  found = [float(rate(np.int32(i))) for i in range(0, STEPS + 1, 4)]
  np.testing.assert_allclose(found, wanted(schedule, in_steps)[::4], rtol=1e-5)


def test_cosine_and_linear_have_known_values_at_quarters():
  # Values of the formulas above at 1/4 and 3/4 of the schedule.
  for schedule, first, last in (
    ("cosine", 1.736, 0.464),
    ("linear", 1.55, 0.65),
  ):
    optim = OptimConfig(lr=PEAK, schedule=schedule, warmup=0, min_lr_ratio=END)
    rate = learning_rate(dataclasses.replace(demo(), steps=STEPS, optim=optim))
    assert float(rate(20)) == pytest.approx(first, abs=1e-3)
    assert float(rate(60)) == pytest.approx(last, abs=1e-3)
