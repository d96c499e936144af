# SPDX-License-Identifier: Apache-2.0
"""Names for saved residuals, and small helpers for all custom_vjps.

A forward pass calls `save_residual` on each array that it saves, except
weights. `jax.checkpoint` policies such as `save_only_these_names` can then keep
or offload the array. Most arrays are named before they are used, so that
recomputation starts from the array that the policy kept. Scalar scales are
named too, because recomputing a scale requires all values that it applies to.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args, overload

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.numerics.formats import is_fp8

try:
  # With jax_remat3, a custom gradient's residual must be named with this
  # function. Otherwise, policies cannot keep the residual.
  from jax.ad_checkpoint import checkpoint_name_fwd

  # `jax.custom_vjp` reads this option when our functions are defined.
  _HAS_CUSTOM_VJP3 = bool(getattr(jax.config, "jax_custom_vjp3", False))
except ImportError:  # JAX 0.11.1 and older.
  from jax.ad_checkpoint import checkpoint_name as checkpoint_name_fwd

  _HAS_CUSTOM_VJP3 = False

Kind = Literal["norm", "activation", "rope", "attention", "linear"]

RESIDUAL_NAMES = tuple(f"coat_{kind}" for kind in get_args(Kind))


def save_residual[Tree](kind: Kind, tree: Tree) -> Tree:
  """Names every array of `tree` "coat_<kind>" for checkpoint policies."""
  return name_residual(f"coat_{kind}", tree)


def name_residual[Tree](name: str, tree: Tree) -> Tree:
  """Names every array of `tree`.

  FP8 arrays are first converted to bytes (see `protect_codes`).
  """

  return _map_bytes(lambda x: checkpoint_name_fwd(x, name), tree)


def _map_bytes[Tree](f: Callable[[Array], Array], tree: Tree) -> Tree:
  """Applies f to all arrays; f sees FP8 arrays as bytes."""

  def of(x):
    if not is_fp8(x.dtype):
      return f(x)
    codes = f(jax.lax.bitcast_convert_type(x, jnp.uint8))
    return jax.lax.bitcast_convert_type(codes, x.dtype)

  return jax.tree.map(of, tree)


def name_of(equation: Any) -> str | None:
  """Returns the name that an equation of a jaxpr gives an array, or None."""
  if equation.primitive.name == "name":
    return equation.params["name"]
  # With jax_remat3, an equation contains an object that has the name.
  return getattr(equation.params.get("_prim"), "params", {}).get("name")


def check_names_are_read(op: str) -> None:
  """Raises ValueError if `jax.checkpoint` ignores names in custom gradients."""
  if getattr(jax.config, "jax_remat3", False) and not _HAS_CUSTOM_VJP3:
    option = getattr(jax.config, "jax_custom_vjp3", False)
    raise ValueError(
      f"{op}: jax_remat3 needs jax_custom_vjp3 and JAX 0.11.2 or newer "
      "(otherwise jax.checkpoint ignores the names of saved arrays), got JAX "
      f"{jax.__version__} with jax_custom_vjp3={option}; "
      "set both options before you import coat_jax, or leave jax_remat3 off"
    )


def residual_scope(kind: Kind) -> AbstractContextManager:
  """Sets the kind of all residuals that plain autodiff saves in this scope."""
  return jax.named_scope(f"coat_{kind}")


def kind_of_scope(name_stack: str) -> str | None:
  """Returns the kind of an equation's innermost `residual_scope`, or None."""
  kinds = re.findall(rf"\bcoat_({'|'.join(get_args(Kind))})\b", name_stack)
  return kinds[-1] if kinds else None


def protect_codes[Tree](residuals: Tree) -> Tree:
  """Copies FP8 residuals, so that only the backward pass reads the copies.

  With a policy, `jax.checkpoint` applies `lax.reduce_precision` to each
  floating-point array that it keeps and that the forward pass also reads. In
  JAX 0.11.2, `reduce_precision` treats E4M3 as a format with infinities, so
  values of 256 and above would become NaN, in the forward pass too. JAX does
  not apply it to bytes, nor to arrays that only the backward pass reads. We
  therefore convert residuals to bytes and back, which makes a copy for the
  backward pass. XLA removes the conversions.
  """

  return _map_bytes(lambda x: x, residuals)


@overload
def cotangent(gradient: Array, primal: Array) -> Array: ...
@overload
def cotangent(gradient: Array, primal: None) -> None: ...
def cotangent(gradient: Array, primal: Array | None) -> Array | None:
  """Reshapes and casts a gradient to match its primal.

  Returns None if there is no primal.
  """

  if primal is None:
    return None
  return gradient.reshape(primal.shape).astype(primal.dtype)
