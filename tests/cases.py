# SPDX-License-Identifier: Apache-2.0
"""Makes realistic and awkward inputs, for all tests."""

import numpy as np

# (shape, group_size): widths of real models, widths that are not powers of two,
# a short last group, a group longer than the row, groups of one value, and more
# than two axes.
SHAPES = [
  ((4, 4096), 128),
  ((3, 1376), 128),
  ((5, 13824), 16),
  ((7, 100), 16),
  ((2, 5), 128),
  ((3, 9), 1),
  ((2, 3, 4, 33), 7),
  ((50,), 16),
]


def activations(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
  """Makes normal values, with a few outlier channels 60 times as large."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=shape)
  x[..., :: max(shape[-1] // 8, 1)] *= 60
  return x.astype(np.float32)


def moments(shape: tuple[int, ...], seed: int = 0):
  """Makes Adam's first and second moments (mu, nu), in f32.

  The sizes of gradients in a row are log-normal and span two orders of
  magnitude. So groups of nu span four or more, as in trained models.
  """
  rng = np.random.default_rng(seed)
  size = 1e-4 * np.exp(rng.normal(size=shape))
  gradients = size * rng.normal(size=(20, *shape))
  decay = 0.9 ** np.arange(20).reshape(-1, *[1] * len(shape))
  mu = 0.1 * np.sum(decay * gradients, axis=0)
  nu = 0.05 * np.sum(np.sqrt(decay) * gradients**2, axis=0)
  return mu.astype(np.float32), nu.astype(np.float32)


def finite_groups(n: int, seed: int = 0) -> dict[str, np.ndarray]:
  """Makes degenerate groups of `n` finite values, by name: f32 [n]."""
  rng = np.random.default_rng(seed)
  normal = rng.normal(size=n)
  sign = np.where(normal < 0, -1.0, 1.0)
  one = np.zeros(n)
  one[n // 2] = -3.1
  outlier = normal.copy()
  outlier[n // 3] = 1e12
  groups = {
    "zeros": np.zeros(n),
    "constant": np.full(n, 0.3),
    "constant_power_of_two": np.full(n, 4.0),
    "one_magnitude": 0.7 * sign,
    "one_nonzero": one,
    "outlier": outlier,
    "subnormal": np.full(n, 1e-40),
    "some_subnormal": np.where(np.arange(n) % 2, 1e-40, normal),
    "smallest_normal": sign * 2.0**-126,
    "tiny": 1e-37 * (1 + np.abs(normal)) * sign,
    "large": 1e37 * np.clip(normal, -9, 9),
    # The very largest f32 would overflow when dequantized with a scale that is
    # rounded up.
    "largest": sign * np.linspace(0.5, 0.99, n) * float(np.finfo("f4").max),
    "huge_ratio": sign * 10 ** np.linspace(-37, 38, n),
    "ratio_just_above_one": 1 + np.arange(n) * 2.0**-23,
  }
  return {name: x.astype(np.float32) for name, x in groups.items()}


def nonfinite_groups(n: int) -> dict[str, np.ndarray]:
  """Makes groups of `n` values with one NaN or infinity, by name: f32 [n]."""
  groups = {}
  for name, value in (("nan", np.nan), ("inf", np.inf), ("minus_inf", -np.inf)):
    groups[name] = np.linspace(-1, 1, n, dtype=np.float32)
    groups[name][n // 2] = value
  return groups
