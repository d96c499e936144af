# SPDX-License-Identifier: Apache-2.0
"""A block: a front, a middle and a back that share one custom_vjp.

  front    x --norm or none--> operand --matmul, bias--> h
  middle   h --elementwise or attention--> operand of the second matmul
  back     operand --matmul, bias--> z --norm or none--> + x (`add_input`)

Blocks differ only in the middle. In one custom_vjp, the three parts can pass
FP8 operands to each other: the norm writes the operand of the first matmul, and
the middle writes the operand of the second. In the backward pass, the middle
writes the gradient of h as an operand.

A block saves what its front (`layers.front`) and its middle save. It also saves
the scale of the second weight, unless the scale is cached or recomputed. If the
back has a norm, z is rounded to FP8 before this norm. The block then saves the
rounded z and the norm's statistics, and gradients pass straight through the
rounding.

On a mesh, the front is column-parallel and the back is row-parallel over the
tensor axis. In the middle, each device has whole sequences, but only a shard of
the features. The back's partial sums are reduce-scattered over positions,
because the norms of x and z need all D features of a position.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from coat_jax import ops
from coat_jax.layers.front import (
  FrontStatic,
  LinearSaved,
  front_backward,
  front_forward,
)
from coat_jax.layers.linear import linear, norm_linear
from coat_jax.layers.middle import Middle, MiddleGradient, MiddleOutput
from coat_jax.layers.module import check_float, check_recipe
from coat_jax.layers.norm import norm, norm_forward, norm_gradients
from coat_jax.layers.operands import gather_sequence, gradient_operand
from coat_jax.layers.product import (
  LinearWeights,
  add_in_f32,
  bias_gradient,
  input_gradient,
  multiply,
  weight_gradient,
  weights_specs,
)
from coat_jax.layers.rule import rule
from coat_jax.mesh import run_whole, spec_of, tokens
from coat_jax.numerics.checks import check_flags, check_kind
from coat_jax.ops import BlockScales
from coat_jax.recipes import CoatRecipe


class BlockWeights(NamedTuple):
  """Parameters of a block, or their gradients.

  Attributes:
    front: weights of the norm and the first matmul.
    back: weights of the second matmul and the norm after it.
    middle: weights of the middle, or None.
  """

  front: LinearWeights
  back: LinearWeights
  middle: Any = None


class BlockStatic(NamedTuple):
  """The static arguments of `block`, without the recipe."""

  middle: Middle
  kind: ops.NormKind | None
  eps: float
  add_input: bool
  post_norm: ops.NormKind | None


def back_forward(
  x: Array,
  out: MiddleOutput,
  weights: LinearWeights,
  static: BlockStatic,
  recipe: CoatRecipe,
  *,
  after: Array | BlockScales | None = None,
) -> tuple[Array, LinearSaved]:
  """Runs the back; returns its output in x's dtype, and the values to save."""
  w = weights
  add = x if static.add_input else None
  z, w_scale = multiply(
    out.operand,
    w,
    "inputs",
    recipe,
    dtype=x.dtype,
    add=add if static.post_norm is None else None,
    after=after if out.after is None else out.after,
  )
  if static.post_norm is None:
    return z, LinearSaved(None, out.saved, w_scale)
  y, saved = norm_forward(
    z, w.gamma, w.beta, static.post_norm, static.eps, recipe
  )
  y = y.astype(x.dtype) if add is None else add_in_f32(add, y)
  return y, LinearSaved(saved, out.saved, w_scale)


def back_backward(
  g: Array,
  middle_weights: Any,
  weights: LinearWeights,
  saved: LinearSaved,
  static: BlockStatic,
  recipe: CoatRecipe,
  *,
  has_bias: bool,
) -> tuple[MiddleGradient, LinearWeights]:
  """Returns the gradients of the middle and of the back's weights."""
  w, middle, dgamma, dbeta = weights, static.middle, None, None
  if saved.norm is not None:
    g, dgamma, dbeta = norm_gradients(
      saved.norm, w.gamma, w.beta, g, None, recipe
    )
  g_q = gather_sequence(gradient_operand(g, recipe), recipe, batch=g.shape[0])
  operand, dw = middle.columns(saved.x, recipe), None
  if operand is not None:
    dw = weight_gradient(operand, g_q, w.w, recipe)
  dout = input_gradient(g_q, w, saved.w_scale, recipe, g.dtype)
  gradient = middle.backward(
    saved.x, dout, middle_weights, recipe, has_bias=has_bias
  )
  if dw is None:
    assert gradient.operand is not None  # See `MiddleGradient`.
    dw = weight_gradient(gradient.operand, g_q, w.w, recipe)
  dbias = bias_gradient(g, w.bias, recipe, has_columns=False)
  return gradient, LinearWeights(dw, dbias, dgamma, dbeta)


def _block_fwd(x, weights, inputs, static, recipe):
  w = weights
  of_front = FrontStatic(static.kind, static.eps)
  h, scale, front = front_forward(x, w.front, of_front, recipe)
  out = static.middle.forward(h, w.middle, inputs, recipe)
  y, back = back_forward(x, out, w.back, static, recipe, after=scale)
  return y, (front, back)


def _block_bwd(static, recipe, inputs, saved, g):
  (w,), (front, back) = inputs, saved
  gradient, dback = back_backward(
    g,
    w.middle,
    w.back,
    back,
    static,
    recipe,
    has_bias=w.front.bias is not None,
  )
  add = g if static.add_input else None
  dx, dfront = front_backward(
    gradient.h, w.front, front, "columns", recipe, like=g, add=add
  )
  dbias = bias_gradient(gradient.values, w.front.bias, recipe, has_columns=True)
  dfront = dfront._replace(bias=dbias)
  return dx, BlockWeights(dfront, dback, gradient.weights), None


def _specs(x, weights, inputs, static, recipe):
  w, axes = weights, recipe.axes
  of_middle, of_inputs = static.middle.specs(axes, w.middle, inputs)
  of_weights = BlockWeights(
    weights_specs(axes, w.front, "columns"),
    weights_specs(axes, w.back, "inputs"),
    of_middle,
  )
  return (tokens(axes, x), of_weights, of_inputs), tokens(axes, x)


_block = rule(_block_fwd, _block_bwd, _specs, reads=(1,))


def block(
  x: Array,
  weights: BlockWeights,
  inputs: Any = None,
  *,
  middle: Middle,
  kind: ops.NormKind | None,
  eps: float,
  post_norm: ops.NormKind | None = None,
  add_input: bool = True,
  recipe: CoatRecipe,
) -> Array:
  """Computes x + post_norm(middle(norm(x) w_front) w_back).

  With the middle `Elementwise`, this is the MLP half of a transformer layer;
  with `SelfAttention`, it is the attention half.

  Args:
    x: [..., D], the residual stream, BF16 (or f32).
    weights: see `BlockWeights`; their shapes depend on the middle.
    inputs: other arrays that the middle reads, such as positions; they get no
      gradient.
    middle: the part between the two matmuls.
    kind: norm of x, "rms" or "layer"; None for no norm.
    eps: epsilon of both norms.
    post_norm: norm after the second matmul, "rms" or "layer"; None for no norm.
    add_input: whether to add x to the result.
    recipe: the block is fused if `recipe.nonlinear` is "fp8".

  Returns:
    [..., D] in x's dtype; without `add_input`, [..., back.w.shape[-1]].

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: shapes are inconsistent, a norm is unknown, or a norm's `eps` is
      negative.
  """
  check_recipe("block", recipe)
  check_float("block", "x", x)
  remedy = "pass BlockWeights(LinearWeights(up), LinearWeights(down))"
  check_kind("block", "weights", weights, BlockWeights, remedy)
  remedy = "pass one, as in Elementwise()"
  check_kind("block", "middle", middle, Middle, remedy)
  check_flags("block", add_input=add_input)
  middle.check(x, weights, inputs, recipe)
  w = weights.back.w
  # With mesh axes, the caller may run this in shard_map, where w is a shard.
  if add_input and not recipe.axes and w.shape[-1] != x.shape[-1]:
    raise ValueError(
      "block: back.w must be [F, D] to add x [..., D], got "
      f"{w.shape} for {x.shape}; pass an x as wide as the module's "
      "features, or add_input=False for an output of another width"
    )
  if recipe.nonlinear == "fp8":
    static = BlockStatic(middle, kind, eps, add_input, post_norm)
    return _block((x, weights, inputs), static, recipe)
  front, back, own = weights
  h = norm_linear(x, front, kind=kind, eps=eps, recipe=recipe)
  y = linear(
    middle.plain(h, own, inputs, recipe),
    back.w,
    back.bias,
    recipe=recipe,
    cache=back.cache,
    split="inputs",
  )
  if post_norm is not None:
    gamma, beta = back.gamma, back.beta
    y = norm(y, gamma, beta, kind=post_norm, eps=eps, recipe=recipe)
  if not add_input:
    return y
  return run_whole(jnp.add, x, y, out_specs=spec_of(x))
