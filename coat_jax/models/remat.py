# SPDX-License-Identifier: Apache-2.0
"""Runs a stack of layers; `Remat` selects what they save and recompute."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, P
from jax.typing import DTypeLike

from coat_jax.layers import RoutingStats, block_inputs_saveable
from coat_jax.layers.remat import codes_saveable, through_codes
from coat_jax.layers.residuals import check_names_are_read
from coat_jax.models.batch import positions
from coat_jax.models.config import Remat
from coat_jax.models.params import param_spec
from coat_jax.numerics.checks import check_choice
from coat_jax.optimizer.masks import leaf_path
from coat_jax.recipes import CoatRecipe, MeshAxes

# Hidden states [B, T, D] and, if there are experts, their routing statistics,
# summed over the layers so far.
Carry = tuple[Array, RoutingStats | None]


def _all_but_gathered(
  primitive, *arrays, call_jaxpr: Any = None, **options
) -> bool:
  """Checkpoint policy that saves what autodiff saves, except gathered weights.

  Excluding weights by `checkpoint_name` would not work: autodiff would still
  save the array to which the name was given. Reshapes are not saved either,
  because they may be views of gathered weights.
  """
  del arrays, options
  names = {primitive.name}
  if primitive.name == "custom_vjp_call":
    names |= {equation.primitive.name for equation in call_jaxpr.eqns}
    names.discard("reshape")
  return not names & {"sharding_constraint", "reshape"}


_POLICIES = {
  "none": _all_but_gathered,
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "full": jax.checkpoint_policies.nothing_saveable,
  "fp8": block_inputs_saveable,
  "fp8_layer": codes_saveable,
}


def check_remat(remat: Remat, recipe: CoatRecipe) -> None:
  """Raises ValueError if `remat` is unknown, or does not fit the recipe."""
  check_choice("remat", "remat", remat, tuple(_POLICIES))
  if remat == "fp8" and recipe.nonlinear != "fp8":
    raise ValueError(
      "remat: 'fp8' needs a recipe whose norms save their inputs in FP8, such "
      f"as coat, got recipe {recipe.name}; pass 'fp8_layer', which rounds each "
      "layer's input, or 'full'"
    )


def layer_forward(
  model: Any, segments: Array | None
) -> Callable[[Carry, Any, Array | None], Carry]:
  """Returns the function of (carry, layer, kind) that runs one layer in a scan.

  `model` is a `Decoder` or a `VisionTower`; `segments` are as for `Decoder`.
  """
  attention = model.layers.attention
  recipe = attention.active_recipe
  axes = recipe.axes
  is_gathering = axes is not None and recipe.linear == "bf16"
  where_seen = positions(segments), segments

  def forward(x, layer, kind):
    where = None if axes is None else P(axes.batch, axes.tensor)
    if axes is not None and is_gathering:
      # If the sequence were split, XLA would exchange the MLP's activations.
      where = P(axes.batch)
      x = jax.lax.with_sharding_constraint(x, where)
      layer = gather_weights(layer, model.dtype, axes)
    x, stats = layer.routed(layer.attention(x, *where_seen, kind))
    if where is not None:
      x = jax.lax.with_sharding_constraint(x, where)
    return x, stats

  remat = model.remat
  if remat == "fp8_layer" and recipe != attention.recipe:
    remat = "none"  # Evaluation in BF16 does not round the residual stream.
  kept = checkpointed(forward, remat, recipe, is_gathering=is_gathering)

  def step(carry, layer, kind):
    x, routing = carry
    x, stats = kept(x, layer, kind)
    return x, jax.tree.map(jnp.add, routing, stats)

  return step


def run_layers(
  model: Any,
  layers: Any,
  carry: Carry,
  kinds: Array | None = None,
  segments: Array | None = None,
) -> Carry:
  """Scans over stacked layers; `kinds` has one entry for each layer."""
  forward = layer_forward(model, segments)
  scan = nnx.scan(forward, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
  return scan(carry, layers, kinds)


def checkpointed(
  forward: Callable, remat: Remat, recipe: CoatRecipe, *, is_gathering: bool
) -> Callable:
  """Wraps a layer's forward pass so that it saves only what `remat` selects.

  "fp8_layer" also rounds the layer's input to FP8. If `is_gathering`, the
  backward pass gathers weights again.
  """
  if remat == "none" and not is_gathering:
    return forward
  if remat in ("fp8", "fp8_layer"):
    check_names_are_read("remat")
  rounded = forward
  if remat == "fp8_layer":
    rounded = lambda x, *args: forward(through_codes(x, recipe), *args)  # noqa: E731
  # In a scan, XLA cannot merge the recomputation with the first forward pass,
  # so `prevent_cse` is not needed.
  return nnx.remat(rounded, prevent_cse=False, policy=_POLICIES[remat])


def gather_weights[L: nnx.Module](
  layer: L, dtype: DTypeLike, axes: MeshAxes
) -> L:
  """Casts the kernels whose rows fsdp splits to `dtype`, and gathers the rows.

  With recipe bf16, XLA partitions the layer. If weights were not gathered here,
  XLA might split a matmul along its contracting dimension and exchange
  activations, or gather weights in f32. `MoE` gathers experts' weights itself.
  """
  without_fsdp = dataclasses.replace(axes, fsdp=None)

  def gather(keys, w):
    path = leaf_path(keys)
    split, whole = (param_spec(path, each) for each in (axes, without_fsdp))
    if whole == split or not path.endswith("/kernel"):
      return w
    # The gradient is f32; autodiff then casts it to the weight's dtype.
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
