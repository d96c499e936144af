# SPDX-License-Identifier: Apache-2.0
"""Trajectories of the reference's CUDA optimizer, step by step.

`data/coat_adamw_*.npz`, computed on an NVIDIA H200 in f32, groups of 128 of a
flat parameter: `hyper` = [lr, b1, b2, eps, weight decay], `p0`, and for each
step s the gradient `g{s}`, the parameter `p{s}`, E4M3 bits `m_q{s}`, `v_q{s}`
and per group the power `m_k{s}`, `v_k{s}`, or, in `noexpand`, the scale
`m_scale{s}`, `v_scale{s}`. `outlier` has two huge gradients in each step,
`tiny` gradients of the order of 1e-6. The reference rounds to nearest.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import codecs
from coat_jax.optax_coat import coat_adamw

DATA = Path(__file__).parent.parent / "data"

# Codes that differ, by case and step: one in all 184,320. At element 4916 of
# step 5 y = 448 (v / amax)^0.8125 is 1.0625003 in float64, two ulp of f32 above
# the midpoint of the codes 1 and 1.125; the GPU's powf ended up on the other
# side of it. (An XLA whose exp2 rounds otherwise may differ in further ones as
# close to a midpoint: hence a share, not equality.)
KNOWN = {("outlier", 5, "v"): [4916]}


def trajectory(name, codec):
  """Yields (step, golden arrays, parameter, state) along a golden run."""
  with np.load(DATA / f"coat_adamw_{name}.npz") as stored:
    golden = dict(stored)
  lr, b1, b2, eps, decay = map(float, golden["hyper"])
  solver = coat_adamw(lr, b1, b2, eps, weight_decay=decay, codec=codec)
  params = jnp.asarray(golden["p0"])
  state = solver.init(params)
  update = jax.jit(solver.update)
  for step in range(1, sum(key[0] == "g" for key in golden) + 1):
    updates, state = update(jnp.asarray(golden[f"g{step}"]), state, params)
    params = optax.apply_updates(params, updates)
    yield step, golden, params, state[0]


def check_codes(codes, golden):
  """Checks that 99.95 % of codes are equal, the rest at most one apart."""
  # Signs and magnitudes are one integer here: no code crosses zero.
  distance = np.abs(np.asarray(codes).view(np.uint8).astype(int) - golden)
  assert np.mean(distance == 0) >= 0.9995
  assert distance.max() <= 1
  return np.flatnonzero(distance).tolist()


@pytest.mark.parametrize("name", ["basic", "outlier", "tiny"])
def test_coat_adamw_follows_golden_trajectory(name):
  codec = codecs.coat(rounding="nearest")
  for step, golden, params, state in trajectory(name, codec):
    differing = {
      moment: check_codes(codes, golden[f"{moment}_q{step}"])
      for moment, codes in (("m", state.mu.codes), ("v", state.nu.codes))
    }
    for moment, where in differing.items():
      assert set(where) <= set(KNOWN.get((name, step, moment), [])), where
    # Powers of sixteenths are exact.
    np.testing.assert_array_equal(state.mu.range / 16, golden[f"m_k{step}"])
    np.testing.assert_array_equal(state.nu.range / 16, golden[f"v_k{step}"])
    error = np.abs(params - golden[f"p{step}"])
    assert np.mean(error <= 1e-6) >= 0.9995
    # No stray parameter either: |p| < 0.125, so each step rounds p by half an
    # ulp, 3.7e-9, here and there, 3.7e-8 in 5 steps; some ten roundings of the
    # update, 1e-3, add 5 * 1e-3 * 10 * 2^-24 = 3e-9. The code that differs does
    # so after the last step.
    assert error.max() <= 4.1e-8


def test_fp8_follows_golden_trajectory_without_expansion():
  codec = codecs.fp8(rounding="nearest")
  for step, golden, params, state in trajectory("noexpand", codec):
    assert not check_codes(state.mu.codes, golden[f"m_q{step}"])
    assert not check_codes(state.nu.codes, golden[f"v_q{step}"])
    for name, amax in (("m", state.mu.amax), ("v", state.nu.amax)):
      # amax is off by an ulp or two (f32 sums and products contracted or not),
      # 1 / 448 and the product by half an ulp each: 4 ulp = 4.8e-7.
      np.testing.assert_allclose(
        amax / 448, golden[f"{name}_scale{step}"], rtol=4.8e-7
      )
    assert np.abs(params - golden[f"p{step}"]).max() <= 4.1e-8
