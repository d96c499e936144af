# SPDX-License-Identifier: Apache-2.0
"""Layers of a model as one: parameters stacked, and what surrounds each."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, P
from jax.typing import DTypeLike

from coat_jax.models.config import Remat
from coat_jax.models.gathering import gather_weights
from coat_jax.models.remat import checkpointed
from coat_jax.numerics.recipes import CoatRecipe
from coat_jax.optimizer.weights import is_matrix

Store = Callable[[str, Array], Array]
# Weights are stored, and saved, in one of these.
_DTYPES = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


def stack_layers[L: nnx.Module](
  make: Callable[[nnx.Rngs], L],
  num_layers: int,
  *,
  store: Store | None,
  rngs: nnx.Rngs,
) -> L:
  """Makes layers whose parameters have a leading axis of layers.

  Args:
    make: a layer, of its random numbers.
    num_layers: how many.
    store: as of `Decoder`; layers are then drawn one after another.
    rngs: all layers' random numbers.
  """
  one_by_one = functools.partial(nnx.scan, in_axes=0, out_axes=0)

  @nnx.split_rngs(splits=num_layers)
  @(nnx.vmap if store is None else one_by_one)
  def stack(rngs: nnx.Rngs) -> L:
    layer = make(rngs)
    store_params(layer, "layers", store)
    return layer

  return stack(rngs)


def layer_forward[L: nnx.Module](
  run: Callable[[Array, L, Array | None], tuple[Array, Any]],
  recipe: CoatRecipe,
  *,
  trained: CoatRecipe,
  dtype: DTypeLike,
  remat: Remat,
) -> Callable[[Array, L, Array | None], tuple[Array, Any]]:
  """A layer with what surrounds it in a scan.

  That is shardings on a mesh, weights that are gathered for layers that XLA
  partitions, and `remat`.

  Args:
    run: run(x, layer, kind) of x [B, T, D], to the same and what the layer says
      of its experts.
    recipe: that runs.
    trained: the layers' recipe in training.
    dtype: of activations.
    remat: what layers compute again in the backward.
  """
  axes = recipe.axes
  is_gathering = axes is not None and recipe.linear == "bf16"

  def forward(x, layer, kind):
    if axes is None:
      return run(x, layer, kind)
    where = P(axes.batch, axes.tensor)
    if is_gathering:
      # Were the sequence split, XLA would move the MLP's activations.
      where = P(axes.batch)
      x = jax.lax.with_sharding_constraint(x, where)
      layer = gather_weights(layer, dtype, axes)
    x, stats = run(x, layer, kind)
    return jax.lax.with_sharding_constraint(x, where), stats

  if remat == "fp8_layer" and recipe != trained:
    remat = "none"  # Evaluation in BF16 rounds no residual stream.
  return checkpointed(forward, remat, recipe, is_gathering=is_gathering)


def check_dtype(where: str, dtype: Any) -> np.dtype:
  """Returns the dtype; raises ValueError if weights cannot be stored in it.

  Args:
    where: begins the message, such as `save_hf: dtype`.
    dtype: what the caller passed.
  """
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


def stored_in(where: str, param_dtype: DTypeLike) -> Store | None:
  """Returns what stores weights in a dtype; None for f32, as they are drawn.

  Norms' scales and biases are f32 always.

  Args:
    where: the function whose argument the dtype is.
    param_dtype: of the weights.

  Raises:
    ValueError: weights cannot be stored in this dtype.
  """
  dtype = check_dtype(f"{where}: param_dtype", param_dtype)
  if dtype == jnp.float32:
    return None
  return lambda path, x: x.astype(dtype if is_matrix(path, x) else jnp.float32)


def store_params(module: Any, path: str, store: Store | None) -> None:
  """Stores parameters of a module at `path` as the caller wants them."""
  if store is None or module is None:
    return
  for keys, node in nnx.iter_graph(module):
    if isinstance(node, nnx.Param):
      node.set_value(store("/".join(map(str, (path, *keys))), node[...]))
