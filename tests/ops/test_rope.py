# SPDX-License-Identifier: Apache-2.0
"""Compares RoPE frequencies with the formulas of transformers in float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.ops.rope import (
  LinearScaling,
  Llama3Scaling,
  Rotary,
  YarnScaling,
  rotate,
  rotation,
)
from tests.comparing import assert_close, assert_same_bits


def plain(theta, size):
  return np.array([theta ** -(i / size) for i in range(0, size, 2)])


def llama3(frequencies, factor, low, high, length):
  out = []
  for f in frequencies:
    wavelength = 2 * math.pi / f
    if wavelength < length / high:
      out.append(f)
    elif wavelength > length / low:
      out.append(f / factor)
    else:
      smooth = (length / wavelength - low) / (high - low)
      out.append((1 - smooth) * f / factor + smooth * f)
  return np.array(out)


def yarn(frequencies, theta, factor, length, fast=32, slow=1):
  size = 2 * len(frequencies)

  def channel(turns):
    return (
      size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
    )

  low = max(math.floor(channel(fast)), 0)
  high = min(math.ceil(channel(slow)), size - 1)
  if low == high:
    high += 0.001
  out = []
  for i, f in enumerate(frequencies):
    ramp = min(max((i - low) / (high - low), 0), 1)
    out.append(f / factor * ramp + f * (1 - ramp))
  return np.array(out)


LLAMA = dict(
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=8192,
)
# In float32, powers of a base up to 1e6 are off by a few ulp, because they are
# computed from the base's rounded logarithm.
ROUNDING = 2e-6


def frequencies(rotary, head_dim=128):
  return np.asarray(rotary.frequencies(head_dim), np.float64)


@pytest.mark.parametrize(
  "rotary, wanted",
  [
    (Rotary(1e4), plain(1e4, 128)),
    (Rotary(1e6, LinearScaling(factor=8.0)), plain(1e6, 128) / 8),
    (
      Rotary(5e5, Llama3Scaling(**LLAMA)),
      llama3(plain(5e5, 128), 8, 1, 4, 8192),
    ),
    (
      Rotary(
        1e6, YarnScaling(factor=4.0, original_max_position_embeddings=32768)
      ),
      yarn(plain(1e6, 128), 1e6, 4, 32768),
    ),
    (
      Rotary(
        1e4,
        YarnScaling(
          factor=40.0,
          original_max_position_embeddings=64,
          beta_fast=9.0,
          beta_slow=2.0,
        ),
        rotary_dim=32,
      ),
      yarn(plain(1e4, 32), 1e4, 40, 64, 9, 2),
    ),
    # In 6 tokens, no channel turns between 1 and 4 times, so there is no ramp.
    (
      Rotary(
        1e4,
        YarnScaling(
          factor=2.0,
          original_max_position_embeddings=6,
          beta_fast=4.0,
          beta_slow=1.0,
        ),
      ),
      yarn(plain(1e4, 128), 1e4, 2, 6, 4, 1),
    ),
    (Rotary(1e4, rotary_dim=96), plain(1e4, 96)),
  ],
)
def test_frequencies_match_the_formulas_of_transformers(rotary, wanted):
  found = frequencies(rotary)
  assert found.shape == wanted.shape
  np.testing.assert_allclose(found, wanted, rtol=ROUNDING)


def test_frequencies_of_llama_3_1_match_known_values():
  """Checks channels 0, 63 and, in the interpolated range, 32."""
  found = frequencies(Rotary(5e5, Llama3Scaling(**LLAMA)))
  # The first channel turns fastest and is not scaled. The last one is
  # 5e5^(-63/64) / 8.
  assert found[0] == 1
  np.testing.assert_allclose(found[63], 3.0689e-7, rtol=1e-4)
  # 5e5^(-1/2) = 1.41421e-3 turns 1.84385 times in 8192 tokens, so it is
  # interpolated, with a weight of 0.281284 for the unscaled frequency.
  np.testing.assert_allclose(found[32], 1.41421e-3 * 0.371124, rtol=1e-4)


@pytest.mark.parametrize(
  "given, wanted",
  [
    ({}, 0.1 * math.log(40) + 1),
    ({"attention_factor": 1.5}, 1.5),
    (
      {"mscale": 1.0, "mscale_all_dim": 0.707},
      (0.1 * math.log(40) + 1) / (0.0707 * math.log(40) + 1),
    ),
    ({"mscale": 0.5}, 0.1 * math.log(40) + 1),
  ],
)
def test_yarn_scales_cos_and_sin_by_its_factor(given, wanted):
  scaling = YarnScaling(
    factor=40.0, original_max_position_embeddings=4096, **given
  )
  rotary = Rotary(1e4, scaling)
  positions = jnp.arange(5, dtype=jnp.int32)
  cos, sin = rotation(positions, head_dim=16, theta=rotary)
  angle = np.arange(5)[:, None] * frequencies(rotary, 16)
  assert_close((cos, sin), (wanted * np.cos(angle), wanted * np.sin(angle)))


def test_rotary_without_options_rotates_like_its_base():
  positions = jnp.arange(7, dtype=jnp.int32)
  assert_same_bits(
    rotation(positions, head_dim=16, theta=Rotary(1e4)),
    rotation(positions, head_dim=16, theta=1e4),
  )


def test_positions_can_differ_between_sequences():
  positions = jnp.int32([[0, 1, 2, 3], [0, 1, 0, 1]])
  found = rotation(positions, head_dim=16, theta=1e4)
  rows = [rotation(row, head_dim=16, theta=1e4) for row in positions]
  assert_same_bits(found, tuple(map(jnp.stack, zip(*rows, strict=True))))


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_kind_of_a_layer_selects_its_rotation(kind):
  thetas = (
    1e4,
    Rotary(1e6, YarnScaling(factor=4.0, original_max_position_embeddings=64)),
    None,
  )
  positions = jnp.arange(7, dtype=jnp.int32)
  found = rotation(positions, head_dim=16, theta=thetas, kind=jnp.int32(kind))
  wanted = rotation(positions, head_dim=16, theta=thetas[kind])
  x = jnp.sin(jnp.arange(2 * 7 * 3 * 16.0)).reshape(2, 7, 3, 16)
  assert_close(rotate(x, *found), rotate(x, *wanted), 1e-6)


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda: LinearScaling(factor=0.5), "LinearScaling: factor must be at l"),
    (
      lambda: YarnScaling(factor=0.5, original_max_position_embeddings=8),
      "YarnScaling: factor must be at least 1 .* got 0.5",
    ),
    (
      lambda: Llama3Scaling(**LLAMA | {"factor": float("nan")}),
      "Llama3Scaling: factor must be at least 1 .* got nan",
    ),
    (
      lambda: Llama3Scaling(**LLAMA | {"low_freq_factor": 4.0}),
      "low_freq_factor must be below high_freq_factor, got low_freq_factor=4.0",
    ),
    (
      lambda: YarnScaling(
        factor=2.0, original_max_position_embeddings=8, beta_fast=0.5
      ),
      "beta_slow must be below beta_fast, got beta_slow=1.0 and beta_fast=0.5",
    ),
    (lambda: Rotary(1e4, rotary_dim=5), "rotary_dim must be even.*got 5"),
    (lambda: Rotary(1e4, rotary_dim=0), "at least 2, got 0"),
    (
      lambda: Rotary(1e4, rotary_dim=18).frequencies(16),
      "rotary_dim must be at most head_dim=16, got 18",
    ),
    (
      lambda: rotation(
        jnp.arange(2),
        head_dim=16,
        theta=(1e4, Rotary(1e4, rotary_dim=8)),
        kind=jnp.int32(0),
      ),
      r"rotary_dim must be the same in all kinds of layers, got \[8, 16\]",
    ),
  ],
)
def test_invalid_options_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
