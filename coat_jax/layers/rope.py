# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (RoPE) that saves only the positions.

The backward pass rotates gradients back, and needs no activations.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, P

from coat_jax import ops
from coat_jax.layers.module import check_float, recipe_of
from coat_jax.layers.residuals import save_residual
from coat_jax.layers.rule import rule
from coat_jax.mesh import (
  own_columns,
  own_heads,
  run_whole,
  spec_of,
  tensor_size,
)
from coat_jax.numerics.checks import check_kind, described, is_array
from coat_jax.ops.rope import (
  Rotary,
  Theta,
  Thetas,
  as_rotary,
  rotate,
  rotate_back,
  rotation,
)
from coat_jax.recipes import CoatRecipe, MeshAxes


@functools.partial(jax.custom_vjp, nondiff_argnames=("theta",))
def _rope(x, positions, kind, theta):
  return _rope_fwd(x, positions, kind, theta)[0]


def _rope_fwd(x, positions, kind, theta):
  cos, sin = rotation(positions, head_dim=x.shape[-1], theta=theta, kind=kind)
  return rotate(x, cos, sin), save_residual("rope", (positions, kind))


def _rope_bwd(theta, saved, g):
  positions, kind = saved
  cos, sin = rotation(positions, head_dim=g.shape[-1], theta=theta, kind=kind)
  return rotate_back(g, cos, sin), None, None


_rope.defvjp(_rope_fwd, _rope_bwd)


def rope(
  x: Array,
  positions: Array,
  *,
  theta: float | Rotary | tuple[Theta, ...],
  kind: Array | None = None,
) -> Array:
  """Rotates the i-th pair of channels by position * theta^(-2 i / R).

  Channels i and i + R / 2 form a pair, as in Hugging Face Transformers. R is H
  unless a `Rotary` sets a smaller `rotary_dim`.

  Args:
    x: [B, T, N, H], H even.
    positions: int32 [T], or [B, T] if they differ between sequences.
    theta: base of the frequencies (1e4 for Llama 2), or a `Rotary`. For a stack
      with several kinds of layers, a tuple with an entry for each kind, where
      None means no rotation.
    kind: int32 scalar, the index into `theta` if that is a tuple.

  Returns:
    Array of x's shape and dtype; angles and rotation are computed in f32.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: H is odd, positions are not integers [T] or [B, T], a base is
      not above 0, `rotary_dim` is above H, or `theta` is a tuple and `kind` is
      None.
  """
  check_float("rope", "x", x, ndim=4)
  check_positions("rope", positions, x)
  if x.shape[-1] % 2:
    raise ValueError(
      "rope: x must be [B, T, N, H] with an even H, because RoPE rotates "
      f"pairs, got {x.shape}; pad the heads to an even size"
    )
  thetas = theta if isinstance(theta, tuple) else (theta,)
  if isinstance(theta, tuple) and kind is None:
    raise ValueError(
      f"rope: kind must select one of {len(theta)} kinds of layers, got None; "
      "pass the index as an int32 scalar"
    )
  for each in thetas:
    if each is not None:
      as_rotary(each).check(x.shape[-1])
  turn = functools.partial(_rope, theta=theta)
  return run_whole(turn, x, positions, kind, out_specs=spec_of(x))


def check_positions(op: str, positions: Any, x: Array) -> None:
  """Raises unless positions are integers [T] or [B, T]; x is [B, T, ...]."""
  is_whole = is_array(positions) and jnp.issubdtype(
    positions.dtype, jnp.integer
  )
  if not is_whole or positions.shape not in (x.shape[1:2], x.shape[:2]):
    raise ValueError(
      f"{op}: needs integer positions [T] or [B, T] for arrays [B, T, ...], "
      f"got positions {described(positions)} for {x.shape}; pass jnp.arange(T)"
    )


class Heads(NamedTuple):
  """The heads that `split_heads` separates, and their RoPE.

  Attributes:
    num_heads: N, query heads.
    num_kv_heads: K, key and value heads.
    theta: RoPE's base, or a `Rotary`, or None for no RoPE; or a tuple with one
      of these for each kind of layer in a stack.
  """

  num_heads: int
  num_kv_heads: int
  theta: Thetas

  def check_columns(self, op: str, columns: int) -> None:
    """Raises unless q, k and v of these heads fill the columns."""
    n, k, _ = self
    if min(n, k) < 1 or n % k or columns % (2 * (n + 2 * k)):
      raise ValueError(
        f"{op}: q, k and v must be (N + 2 K) H columns with N a multiple of K "
        f"and an even H, got {columns} columns, N {n} and K {k}; pass the "
        "weight's numbers of heads"
      )

  def of_device(self, axes: MeshAxes | None) -> "Heads":
    """Returns the heads that each device computes inside a block."""
    count = tensor_size(axes)
    n, k, theta = self
    if n % count or k % count:
      raise ValueError(
        f"layers: {n} heads and {k} key heads must be split evenly, got "
        f"{count} devices along the tensor axis of {axes}; use fewer devices "
        "along this axis"
      )
    return Heads(n // count, k // count, theta)


def split_own_heads(qkv, positions, kind, heads, axes):
  """Computes `split_heads` for one device's columns."""
  n, k, theta = heads.of_device(axes)
  head_dim = qkv.shape[-1] // (n + 2 * k)
  angles = rotation(positions, head_dim=head_dim, theta=theta, kind=kind)
  return ops.split_heads(qkv, *angles, num_heads=n, num_kv_heads=k)


def _split_heads_fwd(qkv, positions, kind, heads, recipe):
  out = split_own_heads(qkv, positions, kind, heads, recipe.axes)
  return out, save_residual("rope", (positions, kind))


def _split_heads_bwd(heads, recipe, inputs, saved, g):
  del inputs
  positions, kind = saved
  angles = rotation(
    positions, head_dim=g[0].shape[-1], theta=heads.theta, kind=kind
  )
  return ops.join_heads(*g, *angles), None, None


def positions_spec(axes: MeshAxes, positions: Array) -> P:
  """Returns the spec of positions [T] or [B, T]: split over the batch only."""
  return P() if positions.ndim == 1 else P(axes.batch)


def _specs(qkv, positions, kind, heads, recipe):
  del kind, heads
  axes = recipe.axes
  arrays = own_columns(axes, qkv.ndim), positions_spec(axes, positions), P()
  return arrays, (own_heads(axes),) * 3


_split_heads = rule(_split_heads_fwd, _split_heads_bwd, _specs)


def split_heads(
  qkv: Array,
  positions: Array,
  heads: Heads,
  *,
  kind: Array | None = None,
  recipe: CoatRecipe | None = None,
) -> tuple[Array, Array, Array]:
  """Splits qkv into q, k and v, and rotates q and k, in a single pass.

  Args:
    qkv: [B, T, (N + 2 K) H], H even, ordered by key head: the N / K query heads
      that share the first key head, this key head, its value head, and so on
      for the next key head.
    positions: int32 [T], or [B, T] if they differ between sequences.
    heads: N, K and theta, as in `Heads(32, 8, 1e4)`.
    kind: int32 scalar, the index into `heads.theta` if that is a tuple.
    recipe: sets the mesh axes; None for no mesh axes.

  Returns:
    q [B, T, N, H] and k, v [B, T, K, H] in qkv's dtype.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: the number of columns does not match the heads, or positions are
      not integers [T] or [B, T].
  """
  op = "split_heads"
  check_float(op, "qkv", qkv, ndim=3)
  check_kind(op, "heads", heads, Heads, "pass one, as in Heads(32, 8, 1e4)")
  recipe = recipe_of(op, recipe)
  heads.check_columns(op, qkv.shape[-1])
  check_positions(op, positions, qkv)
  arrays = qkv, positions, kind
  return _split_heads(arrays, heads, recipe)
