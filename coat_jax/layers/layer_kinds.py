# SPDX-License-Identifier: Apache-2.0
"""Options that may differ between layers of a stack: RoPE and windows.

Scanned layers share one program. So an option that differs between layers is a
tuple with one entry for each kind of layer, and an int32 selects the entry.
"""

from coat_jax import ops
from coat_jax.layers.dot_product_attention import Kinds
from coat_jax.ops.rope import RopeScaling, Rotary, Theta, Thetas

type Windows = int | tuple[int | None, ...] | None
type Bases = float | tuple[float | None, ...] | None
type Scalings = RopeScaling | tuple[RopeScaling | None, ...] | None


def count_kinds(**choices) -> int:
  """Counts the kinds of layers: the length of the tuples, or 1 without tuples.

  Raises a ValueError if tuples differ in length or are empty.
  """
  lengths = {n: len(x) for n, x in choices.items() if isinstance(x, tuple)}
  if len(set(lengths.values())) > 1 or 0 in lengths.values():
    raise ValueError(
      "attention: tuples must have one entry for each kind of layer, got "
      f"{lengths} entries; pass tuples of one length"
    )
  return max(lengths.values(), default=1)


def attention_kinds(
  causal: bool,
  window: Windows,
  soft_cap: float | None,
  scale: float | None,
) -> Kinds:
  """Makes one `AttentionKind`, or one for each window if they differ."""
  windows = window if isinstance(window, tuple) else (window,)
  return _one_or_each(
    tuple(ops.AttentionKind(causal, x, soft_cap, scale) for x in windows)
  )


def rotaries(
  theta: Bases, scaling: Scalings, rotary_dim: int | None, *, head_dim: int
) -> Thetas:
  """Makes one `Rotary`, or one for each kind of layer.

  Raises a ValueError for RoPE options without a base, and for a `rotary_dim`
  above `head_dim`.
  """
  count = count_kinds(rope_theta=theta, rope_scaling=scaling)
  thetas = theta if isinstance(theta, tuple) else (theta,) * count
  scalings = scaling if isinstance(scaling, tuple) else (scaling,) * count
  if set(thetas) == {None} and (rotary_dim, *scalings) != (None,) * (count + 1):
    raise ValueError(
      "Attention: rope_scaling and rotary_dim need RoPE, got "
      f"{scaling} and {rotary_dim} with rope_theta {theta}; pass its base"
    )

  def one(theta, scaling) -> Theta:
    if theta is None:
      return None
    rotary = Rotary(theta, scaling, rotary_dim)
    rotary.check(head_dim)
    return rotary

  return _one_or_each(tuple(map(one, thetas, scalings)))


def _one_or_each(choices: tuple):
  """Returns one choice if all kinds have the same, else the tuple."""
  return choices[0] if len(set(choices)) == 1 else choices
