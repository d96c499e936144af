# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (RoPE): frequencies, angles and the rotation.

Among the first R channels of a head, channels i and i + R / 2 form a pair that
is rotated together, as in Hugging Face Transformers. R is the head size H
unless RoPE is partial. The scalings for longer sequences have the same field
names and give the same results as in Transformers.
"""

import abc
import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from coat_jax.numerics.checks import (
  ANY,
  COUNT,
  NOT_NEGATIVE,
  POSITIVE,
  Range,
  check_kind,
  check_number,
  check_whole,
)


class RopeScaling(abc.ABC):
  """Base class of RoPE scalings: frozen dataclasses that change frequencies."""

  @abc.abstractmethod
  def scaled(self, frequency: Array, *, theta: float) -> Array:
    """Scales the frequencies, f32 [R / 2]; `theta` is RoPE's base."""

  @property
  def magnitude(self) -> float:
    """The factor that cos and sin are multiplied by."""
    return 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeScaling):
  """Divides all frequencies by a factor (position interpolation).

  Attributes:
    factor: the new context length, divided by the original one.

  Raises:
    ValueError: the factor is below 1.

  Source: arXiv:2306.15595, section 2.3.
  """

  factor: float

  def __post_init__(self):
    _check_fields(self)

  def scaled(self, frequency, *, theta):
    del theta
    return frequency / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
  """Divides low frequencies by a factor and keeps high ones, as in Llama 3.1.

  A frequency is low if its channels turn fewer than `low_freq_factor` times
  within the original context length, and high if they turn more than
  `high_freq_factor` times. Between these thresholds, the new frequency is
  interpolated linearly in the number of turns.

  Attributes:
    factor: divisor of low frequencies.
    low_freq_factor, high_freq_factor: thresholds in turns; see above.
    original_max_position_embeddings: the original context length.

  Raises:
    ValueError: the factor is below 1, or `low_freq_factor` is not below
      `high_freq_factor`.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position_embeddings: int

  def __post_init__(self):
    _check_fields(self, "low_freq_factor", "high_freq_factor")

  def scaled(self, frequency, *, theta):
    del theta
    low, high = self.low_freq_factor, self.high_freq_factor
    turns = frequency * (self.original_max_position_embeddings / math.tau)
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequency * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeScaling):
  """Divides low frequencies, keeps high ones, and multiplies cos and sin.

  A frequency is low if its channels turn fewer than `beta_slow` times within
  the original context length, and high if they turn more than `beta_fast`
  times. Between these thresholds, the new frequency is interpolated linearly in
  the channel's index.

  Attributes:
    factor: divisor of low frequencies.
    original_max_position_embeddings: the original context length.
    beta_fast, beta_slow: thresholds in turns; see above.
    attention_factor: multiplies cos and sin. None means 0.1 log(factor) + 1 or,
      if `mscale` and `mscale_all_dim` are above 0,
      (0.1 mscale log(factor) + 1) / (0.1 mscale_all_dim log(factor) + 1).
    mscale, mscale_all_dim: see `attention_factor`.

  Raises:
    ValueError: `factor` is below 1, or `beta_slow` is not below `beta_fast`.

  Source: arXiv:2309.00071, section 3.
  """

  factor: float
  original_max_position_embeddings: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None
  mscale: float | None = None
  mscale_all_dim: float | None = None

  def __post_init__(self):
    _check_fields(self, "beta_slow", "beta_fast")

  def scaled(self, frequency, *, theta):
    half = len(frequency)

    def channel(turns):
      length = self.original_max_position_embeddings / (turns * math.tau)
      return half * math.log(length) / math.log(theta)

    first = max(math.floor(channel(self.beta_fast)), 0)
    last = min(math.ceil(channel(self.beta_slow)), 2 * half - 1)
    width = last - first or 1  # Don't divide by 0.
    channels = jnp.arange(half, dtype=jnp.float32)
    kept = 1 - jnp.clip((channels - first) / width, 0, 1)
    return frequency * (kept + (1 - kept) / self.factor)

  @property
  def magnitude(self) -> float:
    if self.attention_factor is not None:
      return self.attention_factor
    grown = 0.1 * math.log(self.factor)
    if self.mscale and self.mscale_all_dim:
      return (self.mscale * grown + 1) / (self.mscale_all_dim * grown + 1)
    return grown + 1


_RANGES = {
  "factor": Range(1, 3.4e38),
  "attention_factor": NOT_NEGATIVE,
  "mscale": NOT_NEGATIVE,
  "mscale_all_dim": NOT_NEGATIVE,
}


def _check_fields(scaling, low: str = "", high: str = "") -> None:
  """Raises unless all fields are in range and field `low` is below `high`.

  Fields without an entry in `_RANGES` must be above 0.
  """
  op, remedy = type(scaling).__name__, "copy it from the model's config.json"
  for field in dataclasses.fields(scaling):
    name, value = field.name, getattr(scaling, field.name)
    if name == "original_max_position_embeddings":
      check_whole(op, name, value, COUNT, remedy)
    elif value is not None or field.default is not None:
      check_number(op, name, value, _RANGES.get(name, POSITIVE), remedy)
  if low and not getattr(scaling, low) < getattr(scaling, high):
    raise ValueError(
      f"{op}: {low} must be below {high}, got {low}={getattr(scaling, low)} "
      f"and {high}={getattr(scaling, high)}; {remedy}"
    )


@dataclasses.dataclass(frozen=True)
class Rotary:
  """RoPE with all its options.

  Attributes:
    theta: base of the frequencies theta^(-2 i / R).
    scaling: how frequencies change for longer sequences, or None.
    rotary_dim: the number R of channels that RoPE rotates, the first ones of
      each head; None for all.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: `rotary_dim` is odd or below 2, or `theta` is not above 0.
  """

  theta: float
  scaling: RopeScaling | None = None
  rotary_dim: int | None = None

  def __post_init__(self):
    op, size = "Rotary", self.rotary_dim
    check_number(op, "theta", self.theta, POSITIVE, "Llama 2 uses 1e4")
    if self.scaling is not None:
      remedy = "pass an instance, such as LinearScaling(factor=2)"
      check_kind(op, "scaling", self.scaling, RopeScaling, remedy)
    if size is None:
      return
    check_whole(op, "rotary_dim", size, ANY, "pass None for all channels")
    if size < 2 or size % 2:
      raise ValueError(
        "Rotary: rotary_dim must be even, because RoPE rotates pairs, and at "
        f"least 2, got {size}; pass None for all channels"
      )

  def check(self, head_dim: int) -> None:
    """Raises a ValueError if `rotary_dim` is larger than `head_dim`."""
    if self.rotary_dim is not None and self.rotary_dim > head_dim:
      raise ValueError(
        f"Rotary: rotary_dim must be at most head_dim={head_dim}, got "
        f"{self.rotary_dim}; pass None for all channels"
      )

  def frequencies(self, head_dim: int) -> Array:
    """Computes the frequencies f32 [R / 2] for heads of this size."""
    self.check(head_dim)
    half = (head_dim if self.rotary_dim is None else self.rotary_dim) // 2
    frequency = self.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if self.scaling is None:
      return frequency
    return self.scaling.scaled(frequency, theta=self.theta)

  @property
  def magnitude(self) -> float:
    """The factor that cos and sin are multiplied by."""
    return 1.0 if self.scaling is None else self.scaling.magnitude


# RoPE's base or a `Rotary`; None rotates nothing.
type Theta = float | Rotary | None
# A tuple has one entry for each kind of layer in a stack.
type Thetas = Theta | tuple[Theta, ...]

type Angles = tuple[Array, Array] | tuple[None, None]


def rotation(
  positions: Array, *, head_dim: int, theta: Thetas, kind: Array | None = None
) -> Angles:
  """Computes cos and sin of position * frequency, times `Rotary.magnitude`.

  Both are f32 [T, R / 2], or [B, T, R / 2] if positions are [B, T]. If `theta`
  is a tuple, the int32 scalar `kind` selects an entry, and all entries must
  have the same R. If `theta` is None, both results are None.
  """
  if theta is None:
    return None, None
  frequency, magnitude = _frequencies(theta, head_dim, kind)
  positions = positions.astype(jnp.float32)[..., None]
  axes = tuple(range(positions.ndim - 1))
  angle = positions * jnp.expand_dims(frequency, axes)
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  if magnitude is None:
    return cos, sin
  return cos * magnitude, sin * magnitude


def _frequencies(theta, head_dim, kind):
  """Returns frequencies f32 [R / 2], and the magnitude (None if it is 1)."""
  if not isinstance(theta, tuple):
    rotary = as_rotary(theta)
    magnitude = rotary.magnitude
    return rotary.frequencies(head_dim), magnitude if magnitude != 1 else None
  rotaries = [None if x is None else as_rotary(x) for x in theta]
  sizes = {r.rotary_dim or head_dim for r in rotaries if r is not None}
  if len(sizes) > 1:
    raise ValueError(
      "rope: rotary_dim must be the same in all kinds of layers, got "
      f"{sorted(sizes)}; pass one size"
    )
  still = jnp.zeros(max(sizes, default=head_dim) // 2, jnp.float32)
  frequencies = jnp.stack(
    [still if r is None else r.frequencies(head_dim) for r in rotaries]
  )
  magnitudes = [1.0 if r is None else r.magnitude for r in rotaries]
  if set(magnitudes) == {1.0}:
    return frequencies[kind], None
  return frequencies[kind], jnp.asarray(magnitudes, jnp.float32)[kind]


def as_rotary(theta: float | Rotary) -> Rotary:
  """Returns a `Rotary` unchanged; makes a `Rotary` from a base."""
  return theta if isinstance(theta, Rotary) else Rotary(theta)


def rotate_back(x: Array, cos: Array | None, sin: Array | None) -> Array:
  """Computes the transpose of `rotate`: a rotation by the opposite angles."""
  return rotate(x, cos, None if sin is None else -sin)


def rotate(x: Array, cos: Array | None, sin: Array | None) -> Array:
  """Rotates the first R channels of x [B, T, N, H] in pairs, in f32.

  `cos` and `sin` are [T, R / 2] or [B, T, R / 2]; None rotates nothing.
  """
  if cos is None or sin is None:
    return x
  if cos.ndim == 2:
    cos, sin = cos[None, :, None], sin[None, :, None]
  else:
    cos, sin = cos[:, :, None], sin[:, :, None]
  size = 2 * cos.shape[-1]
  is_partial = size < x.shape[-1]
  turning = x[..., :size] if is_partial else x
  a, b = jnp.split(turning.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  rotated = rotated.astype(x.dtype)
  if not is_partial:
    return rotated
  return jnp.concatenate([rotated, x[..., size:]], axis=-1)
