# SPDX-License-Identifier: Apache-2.0
"""Names for what layers save, and small helpers of every custom_vjp.

Each array that a forward saves for its backward goes through `save_residual`,
which names it by one of `RESIDUAL_NAMES` before the array is used, so that what
a policy computes again starts from what it kept. Scalar scales too, since to
compute one again takes the operation in front of it. `jax.checkpoint` policies
can then keep or offload them, and memory can be counted by kind:

  jax.checkpoint(
    layer,
    policy=jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES),
  )

What plain autodiff saves is made under `residual_scope` and is of its kind.
Weights and norm parameters are saved too; they are alive anyway and carry no
name.
"""

import re
from contextlib import AbstractContextManager
from typing import Literal, get_args, overload

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from coat_jax.formats import is_fp8

Kind = Literal["norm", "activation", "rope", "attention", "linear"]

RESIDUAL_NAMES = tuple(f"coat_{kind}" for kind in get_args(Kind))


def save_residual[Tree](kind: Kind, tree: Tree) -> Tree:
  """Names every array of `tree` "coat_<kind>" for checkpoint policies."""
  return name_residual(f"coat_{kind}", tree)


def name_residual[Tree](name: str, tree: Tree) -> Tree:
  """Names every array of `tree`; codes as bytes: see `protect_codes`."""

  def named(x):
    if not is_fp8(x.dtype):
      return checkpoint_name(x, name)
    codes = jax.lax.bitcast_convert_type(x, jnp.uint8)
    codes = checkpoint_name(codes, name)
    return jax.lax.bitcast_convert_type(codes, x.dtype)

  return jax.tree.map(named, tree)


def residual_scope(kind: Kind) -> AbstractContextManager:
  """Says of which kind is what plain autodiff saves of the code inside.

  A scope of names, which compiled programs and profiles show; `kind_of_scope`
  reads it off an equation.
  """
  return jax.named_scope(f"coat_{kind}")


def kind_of_scope(name_stack: str) -> str | None:
  """The kind of the innermost `residual_scope` of an equation, or None."""
  kinds = re.findall(rf"\bcoat_({'|'.join(get_args(Kind))})\b", name_stack)
  return kinds[-1] if kinds else None


def protect_codes[Tree](residuals: Tree) -> Tree:
  """What a forward returns for its backward: other variables, the same bytes.

  Under a policy `jax.checkpoint` puts floating-point arrays that it keeps, and
  that the forward reads as well, through `lax.reduce_precision`. It takes E4M3
  for a format with infinities: 256 and above would become NaN, in the forward
  too (JAX 0.11.2). Bytes, and arrays that only the backward reads, it leaves as
  they are. XLA removes the conversions.
  """

  def again(x):
    if not is_fp8(x.dtype):
      return x
    codes = jax.lax.bitcast_convert_type(x, jnp.uint8)
    return jax.lax.bitcast_convert_type(codes, x.dtype)

  return jax.tree.map(again, residuals)


@overload
def cotangent(gradient: Array, primal: Array) -> Array: ...
@overload
def cotangent(gradient: Array, primal: None) -> None: ...
def cotangent(gradient: Array, primal: Array | None) -> Array | None:
  """A gradient in the shape and dtype of its primal; None for None."""
  if primal is None:
    return None
  return gradient.reshape(primal.shape).astype(primal.dtype)
