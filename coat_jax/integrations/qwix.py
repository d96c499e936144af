# SPDX-License-Identifier: Apache-2.0
"""Runs the matmuls of any flax model in FP8, through qwix.

qwix calls a provider wherever a model calls `jax.lax.dot_general` or
`jnp.einsum`, so the model's code stays as it is. For the backward pass, norms
and activation functions still save their inputs in the model's dtype. To save
these inputs in FP8 too, use the layers in `coat_jax.layers`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from jax import Array

from coat_jax import recipes
from coat_jax.layers import linear


class CoatProvider(qwix.QuantizationProvider):
  """Multiplies activations by weights in FP8, forward and backward.

  A matmul is replaced if it contracts the last axis of x [..., D] with the
  first axis of a weight [D, ...]. Both must be BF16 or f32, and the weight must
  have at least two axes. Matmuls with batch axes, such as attention's, are not
  replaced.

  Args:
    rules: `qwix.QuantizationRule`s. Their `module_path` and `op_names` select
      matmuls; other fields are ignored. By default all matmuls are selected.
    recipe: how matmuls are computed, and what they save for the backward pass.

  Examples:
    >>> import jax.numpy as jnp, qwix
    >>> from flax import nnx
    >>> from coat_jax.integrations.qwix import CoatProvider
    >>> model, x = nnx.Linear(64, 128, rngs=nnx.Rngs(0)), jnp.ones((8, 64))
    >>> fp8 = qwix.quantize_model(model, CoatProvider(), x)
    >>> error = jnp.abs(fp8(x) - model(x)).max()
    >>> print(error > 0, error < 0.1)
    True True
  """

  def __init__(
    self,
    rules: Sequence[qwix.QuantizationRule] = (qwix.QuantizationRule(),),
    *,
    recipe: recipes.CoatRecipe = recipes.coat(),  # noqa: B008 (it is frozen)
  ):
    super().__init__(rules)
    self._recipe = recipe

  def get_intercept_map(self) -> dict[str, Any]:
    """Maps the names of JAX functions to the functions that replace them."""
    return super().get_intercept_map() | {
      "jax.lax.dot_general": self._dot_general,
      "jax.numpy.einsum": self._einsum,
    }

  def _selects(self, op: str) -> bool:
    return self._get_current_rule_and_op_id(op)[0] is not None

  def _dot_general(self, lhs, rhs, dimension_numbers, *args, **kwargs):
    (axes, w_axes), (batch, _) = dimension_numbers
    if batch or not _is_matmul(lhs, rhs) or not self._selects("dot_general"):
      return jax.lax.dot_general(lhs, rhs, dimension_numbers, *args, **kwargs)
    return self._matmul(lhs, rhs, tuple(axes), tuple(w_axes), kwargs)

  def _einsum(self, subscripts, *operands, **kwargs):
    axes = _contracted(subscripts, operands)
    if axes is None or not self._selects("einsum"):
      return jnp.einsum(subscripts, *operands, **kwargs)
    x, w = operands
    return self._matmul(x, w, *axes, kwargs)

  def _matmul(
    self, x: Array, w: Array, axes: tuple, w_axes: tuple, options: dict
  ) -> Array:
    """Contracts `axes` of x with `w_axes` of w; other axes keep their order."""
    x = jnp.moveaxis(x, axes, range(-len(axes), 0))
    w = jnp.moveaxis(w, w_axes, range(len(w_axes)))
    width = math.prod(w.shape[: len(w_axes)])
    x = x.reshape(*x.shape[: x.ndim - len(axes)], width)
    w = w.reshape(width, *w.shape[len(w_axes) :])
    y = linear(x, w, recipe=self._recipe)
    dtype = options.get("preferred_element_type")
    return y if dtype is None else y.astype(dtype)


def _is_matmul(x: Any, w: Any) -> bool:
  dtypes = (jnp.bfloat16, jnp.float32)
  return x.dtype in dtypes and w.dtype in dtypes and w.ndim > 1


def _contracted(
  subscripts: Any, operands: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
  """Returns the axes of x and w that an einsum like "btd,dnh->btnh" contracts.

  The result's axes must be the uncontracted axes of x, followed by those of w.
  Returns None for all other einsums.
  """
  if len(operands) != 2 or not isinstance(subscripts, str):
    return None
  inputs, arrow, out = subscripts.replace(" ", "").partition("->")
  x, _, w = inputs.partition(",")
  letters = [c for c in w if c in x]
  kept = [c for c in x if c not in w] + [c for c in w if c not in x]
  ellipsis = x.startswith("...")
  if not arrow or not letters or "." in w or any(c in out for c in letters):
    return None
  if "".join(kept) != out or not _is_matmul(*operands):
    return None
  named = x.removeprefix("...")
  offset = operands[0].ndim - len(named) if ellipsis else 0
  axes = tuple(offset + named.index(c) for c in letters)
  return axes, tuple(map(w.index, letters))
