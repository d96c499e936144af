# SPDX-License-Identifier: Apache-2.0
"""Initializes the parameters of models, and converts them for storage."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax import recipes
from coat_jax.numerics.checks import dtype_of
from coat_jax.optimizer.masks import is_norm_or_bias

# Converts the parameter at a path to the form in which it is stored.
Store = Callable[[str, Array], Array]
# The dtypes that weights can have, in models and in checkpoints.
_DTYPES = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))
STDDEV = 0.02  # The standard deviation of random weights.


class Start(NamedTuple):
  """The dtype of activations, and the keys for random parameters."""

  dtype: DTypeLike
  rngs: nnx.Rngs

  def options(self, **others: Any) -> dict[str, Any]:
    """Returns arguments for making a layer; `others` override the defaults."""
    defaults: dict[str, Any] = dict(
      kernel_init=nnx.initializers.normal(STDDEV),
      recipe=recipes.bf16(),
      dtype=self.dtype,
      rngs=self.rngs,
    )
    return defaults | others

  def param(self, *shape: int) -> nnx.Param:
    """Draws a random parameter in f32."""
    init = nnx.initializers.normal(STDDEV)
    return nnx.Param(init(self.rngs.params(), shape, jnp.float32))


def check_dtype(where: str, dtype: Any) -> np.dtype:
  """Returns a dtype for weights; raises ValueError if it is not supported."""
  found = dtype_of(dtype)
  if found not in _DTYPES:
    got = repr(dtype) if found is None else found.name
    raise ValueError(
      f"{where} must be float32, bfloat16 or float16, got {got}; pass one of "
      "these"
    )
  return found


def stored_in(op: str, param_dtype: DTypeLike) -> Store | None:
  """Returns a `Store` that casts all but norms and biases; None for f32."""
  dtype = check_dtype(f"{op}: param_dtype", param_dtype)
  if dtype == jnp.float32:  # Parameters are drawn in f32.
    return None
  return lambda path, x: x if is_norm_or_bias(path, x) else x.astype(dtype)


def store_params(module: Any, path: str, store: Store | None) -> None:
  """Converts the parameters of the module at `path` with `store`."""
  if store is None or module is None:
    return
  for keys, node in nnx.iter_graph(module):
    if isinstance(node, nnx.Param):
      node.set_value(store("/".join(map(str, (path, *keys))), node[...]))
