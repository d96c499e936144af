# SPDX-License-Identifier: Apache-2.0
"""RoPE frequencies, and how models scale them to longer sequences.

The scalings compute what Hugging Face Transformers computes; their fields have
the names that its configurations use.
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
  """Base of RoPE scalings: a frozen dataclass that changes frequencies."""

  @abc.abstractmethod
  def scaled(self, frequency: Array, *, theta: float) -> Array:
    """Scales the frequencies f32 [R / 2] of a RoPE with base theta."""

  @property
  def magnitude(self) -> float:
    """The factor that cos and sin are multiplied by."""
    return 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeScaling):
  """Divides all frequencies by a factor (position interpolation).

  Attributes:
    factor: how many times longer sequences become.

  Raises:
    ValueError: the factor is below 1.

  Source: arXiv:2306.15595, section 2.3.
  """

  factor: float

  def __post_init__(self):
    _require_factor(self)

  def scaled(self, frequency, *, theta):
    del theta
    return frequency / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
  """Divides low frequencies by a factor and keeps high ones: Llama 3.1.

  A frequency is low if it turns less than `low_freq_factor` times in the
  original length, high if it turns more than `high_freq_factor` times; between
  them the two are interpolated linearly.

  Attributes:
    factor: divisor of low frequencies.
    low_freq_factor, high_freq_factor: numbers of turns.
    original_max_position_embeddings: the original context length.

  Raises:
    ValueError: the factor is below 1, or the low number of turns is not below
      the high one.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position_embeddings: int

  def __post_init__(self):
    _require_factor(self)
    _check_turns(self, "low_freq_factor", "high_freq_factor")
    _check_length(self)

  def scaled(self, frequency, *, theta):
    del theta
    low, high = self.low_freq_factor, self.high_freq_factor
    turns = frequency * (self.original_max_position_embeddings / math.tau)
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequency * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeScaling):
  """Divides low frequencies by a factor, keeps high ones; scales cos and sin.

  Channels between those that turn `beta_fast` and `beta_slow` times in the
  original length are interpolated, linearly in the channel.

  Attributes:
    factor: divisor of low frequencies.
    original_max_position_embeddings: the original context length.
    beta_fast, beta_slow: numbers of turns.
    attention_factor: factor of cos and sin. None computes it from `factor`:
      0.1 log(factor) + 1 or, with both `mscale` and `mscale_all_dim`, the
      quotient of 0.1 mscale log(factor) + 1 and the same for mscale_all_dim.
    mscale, mscale_all_dim: see `attention_factor`.

  Raises:
    ValueError: the factor is below 1, or the slow number of turns is not below
      the fast one.

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
    _require_factor(self)
    _check_turns(self, "beta_slow", "beta_fast")
    _check_length(self)
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
      if (value := getattr(self, name)) is not None:
        remedy = "leave it out for what follows from the factor"
        check_number("YarnScaling", name, value, NOT_NEGATIVE, remedy)

  def scaled(self, frequency, *, theta):
    half = len(frequency)

    def channel(turns):
      length = self.original_max_position_embeddings / (turns * math.tau)
      return half * math.log(length) / math.log(theta)

    first = max(math.floor(channel(self.beta_fast)), 0)
    last = min(math.ceil(channel(self.beta_slow)), 2 * half - 1)
    width = last - first or 1  # If the two are equal (a step), any width works.
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


# Remedy in error messages: these numbers come with a model.
_REMEDY = "copy it from the model's config.json"


def _require_factor(scaling) -> None:
  name, allowed = type(scaling).__name__, Range(1, 3.4e38)
  check_number(name, "factor", scaling.factor, allowed, _REMEDY)


def _check_turns(scaling, low: str, high: str) -> None:
  """Raises if two numbers of turns are not positive and in order."""
  op = type(scaling).__name__
  turns = getattr(scaling, low), getattr(scaling, high)
  for name, value in zip((low, high), turns, strict=True):
    check_number(op, name, value, POSITIVE, _REMEDY)
  if not turns[0] < turns[1]:
    raise ValueError(
      f"{op}: {low} must be between 0 and {high}, got {turns[0]} and "
      f"{turns[1]}; {_REMEDY}"
    )


def _check_length(scaling) -> None:
  name = "original_max_position_embeddings"
  op, value = type(scaling).__name__, getattr(scaling, name)
  check_whole(op, name, value, COUNT, _REMEDY)


@dataclasses.dataclass(frozen=True)
class Rotary:
  """RoPE with all its options.

  Attributes:
    theta: base of the frequencies theta^(-2 i / R).
    scaling: how frequencies are scaled to longer sequences, or None.
    rotary_dim: R, how many of a head's first channels rotate; None for all. The
      other channels stay unchanged.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: `rotary_dim` is odd or below 2, or the base is not above 0.
  """

  theta: float
  scaling: RopeScaling | None = None
  rotary_dim: int | None = None

  def __post_init__(self):
    op, size = "Rotary", self.rotary_dim
    check_number(op, "theta", self.theta, POSITIVE, "1e4 is Llama 2's")
    if self.scaling is not None:
      remedy = "pass one, as in LinearScaling(factor=2)"
      check_kind(op, "scaling", self.scaling, RopeScaling, remedy)
    if size is not None:
      remedy = "None turns all channels"
      check_whole(op, "rotary_dim", size, ANY, remedy)
    if size is not None and (size < 2 or size % 2):
      raise ValueError(
        "Rotary: rotary_dim must be even, for RoPE rotates pairs, and at least "
        f"2, got {size}; None turns all channels"
      )

  def check(self, head_dim: int) -> None:
    """Raises a ValueError if heads of this size have too few channels."""
    if self.rotary_dim is not None and self.rotary_dim > head_dim:
      raise ValueError(
        f"Rotary: rotary_dim must be at most the heads' size {head_dim}, got "
        f"{self.rotary_dim}; None turns all channels"
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
