# SPDX-License-Identifier: Apache-2.0
"""Makes the parameters of models: initializes and stores them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax.numerics import recipes
from coat_jax.optimizer.weights import is_matrix

# Converts the parameter at a path to the form in which it is stored.
Store = Callable[[str, Array], Array]
# The dtypes in which weights can be stored and saved.
_DTYPES = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))
_STDDEV = 0.02


class Start(NamedTuple):
  """Options for initializing the parameters of a model.

  Attributes:
    dtype: dtype of activations.
    rngs: parameters are drawn from its stream `params`.
  """

  dtype: DTypeLike
  rngs: nnx.Rngs

  def norm_options(self, **others: Any) -> dict[str, Any]:
    """Returns arguments for norms before and after the layers, in BF16."""
    shared = dict(recipe=recipes.bf16(), dtype=self.dtype, rngs=self.rngs)
    return shared | others

  def options(self, **others: Any) -> dict[str, Any]:
    """Returns arguments for linear layers before and after the stack."""
    init = nnx.initializers.normal(_STDDEV)
    return self.norm_options(kernel_init=init) | others

  def block_options(self, num_layers: int, **others: Any) -> dict[str, Any]:
    """Returns arguments for the attention and MLP blocks of a layer.

    Projections that write to the residual stream start smaller, so that its
    variance does not grow with depth.
    """
    small = nnx.initializers.normal(_STDDEV * (2 * num_layers) ** -0.5)
    return self.options(out_kernel_init=small, **others)

  def param(self, *shape: int) -> nnx.Param:
    """Initializes a parameter in f32, at random."""
    init = nnx.initializers.normal(_STDDEV)
    return nnx.Param(init(self.rngs.params(), shape, jnp.float32))


def check_dtype(where: str, dtype: Any) -> np.dtype:
  """Returns the dtype; raises ValueError if weights cannot be stored in it."""
  try:
    found = jnp.dtype(dtype)
  except TypeError:
    found = None
  if found is None or found not in _DTYPES:
    got = repr(dtype) if found is None else found.name
    raise ValueError(
      f"{where} must be float32, bfloat16 or float16, got {got}; pass one of "
      "these"
    )
  return found


def stored_in(op: str, param_dtype: DTypeLike) -> Store | None:
  """Returns a `Store` that casts weights, but not norms and biases."""
  dtype = check_dtype(f"{op}: param_dtype", param_dtype)
  if dtype == jnp.float32:  # Parameters are drawn in f32.
    return None
  return lambda path, x: x.astype(dtype if is_matrix(path, x) else jnp.float32)


def store_params(module: Any, path: str, store: Store | None) -> None:
  """Converts the parameters of the module at `path` with `store`."""
  if store is None or module is None:
    return
  for keys, node in nnx.iter_graph(module):
    if isinstance(node, nnx.Param):
      node.set_value(store("/".join(map(str, (path, *keys))), node[...]))
