# SPDX-License-Identifier: Apache-2.0
"""FP8 rematerialization: `jax.checkpoint` that keeps activations in FP8.

`fp8_remat` transforms a function, and `block_inputs_saveable` is a policy. Both
keep FP8 codes and a scale per 1 x G group. For each token of width D they keep:

  fp8_remat               a function's argument, D + 2 D / G bytes
  block_inputs_saveable   the input and the statistics of each block's norm; for
                          two blocks with RMSNorms and G = 16, 2.25 D + 8 bytes

`fp8_remat` rounds the residual stream itself, once per call. The policy adds no
rounding, because a block's norm reads rounded values anyway. With the policy,
recomputation skips the second matmul of each block. If a norm follows that
matmul, the norm's input is kept too. If a layer's first block has no norm, the
layer's input is kept too, in BF16.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.layers.module import recipe_of
from coat_jax.layers.operands import in_groups
from coat_jax.layers.residuals import check_names_are_read, name_residual
from coat_jax.layers.rule import rule
from coat_jax.numerics.checks import ANY, check_function, check_whole, refuse
from coat_jax.recipes import CoatRecipe

_INPUT = "coat_input"

# The policy to use with `through_codes`.
codes_saveable = jax.checkpoint_policies.save_only_these_names(_INPUT)


def block_inputs_saveable(primitive, *avals, name: str = "", **others) -> bool:
  """A policy for `jax.checkpoint` that keeps the inputs of FP8 blocks' norms.

  It keeps the FP8 codes and statistics that all norms save except the norms of
  q and k. It also keeps all scalar scales of matmul operands: without them,
  recomputation would need the norm's input in BF16.

  Args:
    primitive: the primitive of the equation that JAX asks about.
    *avals: the types of its arguments.
    name: the name that `checkpoint_name` gave the array.
    **others: the equation's other parameters.

  Returns:
    Whether the equation's results are kept.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from coat_jax.layers import MLP, block_inputs_saveable
    >>> from flax import nnx
    >>> graph, params = nnx.split(MLP(64, 192, rngs=nnx.Rngs(0)))
    >>> forward = jax.checkpoint(
    ...   lambda params, x: nnx.merge(graph, params)(x),
    ...   policy=block_inputs_saveable,
    ... )
    >>> x = jnp.ones((2, 16, 64), jnp.bfloat16)
    >>> kept = jax.eval_shape(lambda *a: jax.vjp(forward, *a)[1], params, x)
    >>> kept = jax.tree.leaves(kept)
    >>> sorted(str(a.dtype) for a in kept if a.shape[:2] == (2, 16))
    ['bfloat16', 'float32', 'uint8']
  """
  del primitive, others
  is_scalar = all(aval.ndim == 0 for aval in avals)
  return name == "coat_norm" or (name == "coat_linear" and is_scalar)


def fp8_remat(
  f: Callable,
  argnums: int | Sequence[int] = 0,
  *,
  recipe: CoatRecipe | None = None,
  prevent_cse: bool = True,
) -> Callable:
  """Rounds some arguments of f to FP8, and saves only their codes.

  As with `jax.checkpoint(f)`, f's arguments are kept, and the backward pass
  recomputes the rest. Arguments in `argnums` are kept as FP8 codes with a scale
  per 1 x G group: about 1.13 bytes per value with G = 16. The forward pass and
  its recomputation read the dequantized values. Gradients of f are computed at
  these values, and pass straight through the rounding. Other arguments, such as
  weights, are kept unchanged, and so are arrays that f closes over.

  Args:
    f: a function of arrays and trees of arrays. Bind arguments of other types
      with `functools.partial`.
    argnums: indices of the arguments to round. In trees, every float array
      [..., n] is rounded; scalars and integers are kept unchanged.
    recipe: selects the group size, the format, the implementation and the mesh
      axes. With mesh axes, rounded arrays must be [B, T, ...] (or rows
      [N, ...]). None for `recipes.coat()`.
    prevent_cse: see `jax.checkpoint`. Pass False in the body of a
      `jax.lax.scan`, where XLA cannot merge the second forward pass with the
      first.

  Returns:
    A function with the same arguments and results as f.

  Raises:
    TypeError: f is not a function, `argnums` are not integers, or `recipe` is
      not a CoatRecipe.
    ValueError: `argnums` is empty; a call has fewer positional arguments than
      `argnums` requires; or JAX's option `jax_remat3` is on without
      `jax_custom_vjp3` (JAX would then keep the arguments, not their codes).

  Source: the 1 x G groups are from arXiv:2410.19313. That paper does not round
    the arguments of a checkpoint.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from coat_jax.layers import fp8_remat
    >>> def layer(x, w):
    ...   return x + jax.nn.gelu(x @ w)
    >>> x, w = jnp.ones((4, 16, 64)), jnp.eye(64)
    >>> saving = fp8_remat(layer)
    >>> kept = jax.eval_shape(lambda x, w: jax.vjp(saving, x, w)[1], x, w)
    >>> for array in jax.tree.leaves(kept):
    ...   print(array.dtype, array.shape)
    float32 (64, 64)
    uint8 (4, 16, 64)
    bfloat16 (4, 16, 4)
  """
  op = "fp8_remat"
  check_function(op, "f", f, "pass a function of arrays")
  is_one = not isinstance(argnums, tuple | list)
  places: Any = (argnums,) if is_one else tuple(argnums)
  if not places:
    needs = "at least one index"
    refuse(
      ValueError, op, "argnums", needs, argnums, "pass 0, or use jax.checkpoint"
    )
  for place in places:
    check_whole(op, "argnums", place, ANY, "0 is the first argument")
  recipe = recipe_of(op, recipe)

  def of_codes(*args, **kwargs):
    rounded = list(args)
    for i in places:
      rounded[i] = through_codes(args[i], recipe)
    return f(*rounded, **kwargs)

  saving = jax.checkpoint(
    of_codes, policy=codes_saveable, prevent_cse=prevent_cse
  )

  @functools.wraps(f)
  def wrapped(*args, **kwargs):
    check_names_are_read(op)
    if not all(-len(args) <= i < len(args) for i in places):
      raise ValueError(
        f"fp8_remat: argnums {places} must be indices of positional arguments, "
        f"got {len(args)} of them; pass the arguments to round by position"
      )
    return saving(*args, **kwargs)

  return wrapped


def through_codes[Tree](tree: Tree, recipe: CoatRecipe) -> Tree:
  """Rounds float arrays to 1 x G codes, which `codes_saveable` keeps."""

  def of(x: Any) -> Any:
    x_type = jax.typeof(x)
    if not x_type.ndim or not jnp.issubdtype(x_type.dtype, jnp.floating):
      return x
    return _through_codes((x,), recipe)

  return jax.tree.map(of, tree)


def _fwd(x: Array, recipe: CoatRecipe):
  codes = name_residual(_INPUT, in_groups(x, recipe))
  return codes.dequantize(x.dtype), ()


def _bwd(recipe, inputs, saved, g):
  del recipe, inputs, saved
  return (g,)


_through_codes = rule(_fwd, _bwd)
