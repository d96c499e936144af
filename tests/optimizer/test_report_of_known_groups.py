# SPDX-License-Identifier: Apache-2.0
"""Tests reports on states with constructed groups, whose powers are known."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import codecs
from coat_jax.optimizer import state_report
from tests.optimizer.adam_states import from_adam

ROWS, GROUP = 64, 64
# Ratio of the largest to the smallest value of a group. The power k expands it
# to 448^2 / 2, so k is 2 if the ratio is the square root of that.
RATIO = np.sqrt(448**2 / 2)


def state(codec, zero_rows):
  """Returns a state with one group per row; the first rows are zero."""
  row = np.geomspace(1e-4, 1e-4 * RATIO, GROUP)
  values = np.tile(row, (ROWS, 1)).astype(np.float32)
  values[:zero_rows] = 0
  leaf = {"w": jnp.asarray(values)}
  adam = optax.ScaleByAdamState(jnp.int32(1), leaf, leaf)
  return from_adam(adam, codec)


@pytest.mark.parametrize("zero_rows", [0, 1, 48])
def test_powers_of_groups_of_zeros_are_not_counted(zero_rows):
  codec = codecs.coat(GROUP)
  report = state_report(state(codec, zero_rows))["w"]
  for moment in ("mu", "nu"):
    # Powers are rounded down to multiples of a sixteenth.
    powers = report[moment]["power"]
    assert set(powers) == {"min", "p10", "median", "p90", "max", "mean"}
    for name, power in powers.items():
      assert power == pytest.approx(2, abs=1 / 16), name
    assert powers["min"] == powers["max"]
    assert report[moment]["zeroed"] == zero_rows / ROWS


def test_a_leaf_of_zeros_has_no_powers():
  codec = codecs.coat(GROUP)
  report = state_report(state(codec, ROWS))["w"]
  assert "power" not in report["mu"] and report["mu"]["zeroed"] == 1


def test_quantiles_of_powers_are_taken_over_groups():
  # Three quarters of the groups get k = 1, and the others k = 2.
  one, two = (np.geomspace(1e-4, 1e-4 * RATIO**n, GROUP) for n in (2, 1))
  rows = np.concatenate([np.tile(one, (48, 1)), np.tile(two, (16, 1))])
  leaf = {"w": jnp.asarray(rows, jnp.float32)}
  codec = codecs.coat(GROUP)
  adam = optax.ScaleByAdamState(jnp.int32(1), leaf, leaf)
  powers = state_report(from_adam(adam, codec))["w"]
  powers = powers["mu"]["power"]
  want = dict(min=1, p10=1, median=1, p90=2, max=2, mean=1.25)
  assert powers == {
    name: pytest.approx(value, abs=1 / 16) for name, value in want.items()
  }
