# SPDX-License-Identifier: Apache-2.0
"""Weights of layers that XLA partitions, gathered where it would not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, P
from jax.typing import DTypeLike

from coat_jax.models.params import param_spec, path_of
from coat_jax.numerics.recipes import MeshAxes


def gather_weights[L: nnx.Module](
  layer: L, dtype: DTypeLike, axes: MeshAxes
) -> L:
  """For layers that XLA partitions: weights in `dtype` with all their rows.

  Else XLA may split a product along the rows and move activations, or gather
  weights in f32. Gradients go back to the rows' devices where they are summed.
  Those of experts, which are no kernels, each device gathers in the layer.
  """

  without_fsdp = dataclasses.replace(axes, fsdp=None)

  def gather(path, w):
    split, whole = (param_spec(path_of(path), a) for a in (axes, without_fsdp))
    if whole == split or path[-1].key != "kernel":
      return w
    # Its gradient is f32 and then cast to the weight's dtype.
    return _constrained(w.astype(jnp.float32), dtype, split, whole)

  graph, params, others = nnx.split(layer, nnx.Param, ...)
  params = jax.tree.map_with_path(gather, nnx.to_pure_dict(params))
  return nnx.merge(graph, params, others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _constrained(w: Array, dtype: DTypeLike, spec: P, whole: P) -> Array:
  del spec
  return jax.lax.with_sharding_constraint(w.astype(dtype), whole)


def _constrained_fwd(w, dtype, spec, whole):
  return _constrained(w, dtype, spec, whole), None


def _constrained_bwd(dtype, spec, whole, residuals, g):
  del dtype, whole, residuals
  return (jax.lax.with_sharding_constraint(g, spec).astype(jnp.float32),)


_constrained.defvjp(_constrained_fwd, _constrained_bwd)
