# SPDX-License-Identifier: Apache-2.0
"""What `jax.checkpoint` keeps in FP8, to compute the rest of a layer again.

Two forms, both with codes of 1 x G groups and their scales; bytes per token of
width D (G = 16; U is a BF16 copy, 2 D bytes):

  fp8_remat               of a function's argument          D + 2 D / G   0.56 U
  block_inputs_saveable   of the input of each block's norm, with its
                          statistics; a layer has two       2.25 D + 8    1.13 U

`fp8_remat` rounds its argument and calls the function with what the codes stand
for, in both forwards: the residual stream itself is rounded, once a call.
`block_inputs_saveable` is a policy for layers that are made of FP8 blocks. All
that a block's norm, products and middle read are its norm's codes already, so
the second forward is the first again and nothing is rounded that was not; and
the block's second product, which only the residual stream reads, is not
computed again. The input of a norm behind that product is kept as well. A block
without a norm in front reads its input itself: where it is a layer's first one,
the layer's input is kept too, in BF16.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax import ops
from coat_jax.checks import ANY, check_function, check_whole, refuse
from coat_jax.layers.mesh.rule import rule
from coat_jax.layers.mesh.specs import tokens
from coat_jax.layers.module import recipe_of
from coat_jax.layers.residuals import name_residual
from coat_jax.qtensor import dequantize
from coat_jax.recipe import CoatRecipe

_INPUT = "coat_input"

# The policy that goes with `through_codes`.
codes_saveable = jax.checkpoint_policies.save_only_these_names(_INPUT)


def block_inputs_saveable(primitive, *avals, name: str = "", **others) -> bool:
  """A policy for `jax.checkpoint`: the inputs of FP8 blocks' norms.

  Keeps the codes and statistics of every norm of recipe coat, and the scalar
  scales behind it. (Without these the second forward would need the norm's
  input in BF16 to find them.)

  Args:
    primitive: of the equation that JAX asks about.
    *avals: its arguments' types.
    name: of an array that `checkpoint_name` named.
    **others: its other parameters.

  Returns:
    Whether its results are kept.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from coat_jax.layers import GatedMLP, block_inputs_saveable
    >>> from flax import nnx
    >>> graph, params = nnx.split(GatedMLP(64, 192, rngs=nnx.Rngs(0)))
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
  """f with some arguments rounded to FP8; their codes are all that it saves.

  As `jax.checkpoint(f)`, which keeps f's arguments and computes the rest again
  in the backward, but of arguments of `argnums` it keeps 1 x G codes and their
  scales: about 1.13 bytes a value with G = 16. Both forwards read the values
  that the codes stand for. Their gradient is that of f at those values, taken
  straight through the rounding. Other arguments (weights), and arrays that f
  closes over, are kept as they are, and have gradients as in `jax.checkpoint`.

  Args:
    f: a function of arrays and trees of arrays. (Bind what is no array with
      `functools.partial`.)
    argnums: places of the arguments that are rounded, trees too: each float
      array [..., n] of them; scalars and integers are kept as they are.
    recipe: its group size, format of values, implementation, and axes of a
      mesh, on which these arrays are [B, T, ...] (or rows [N, ...]); None for
      `recipe.coat()`.
    prevent_cse: as of `jax.checkpoint`: False in the body of a `jax.lax.scan`,
      where XLA cannot mistake the second forward for the first.

  Returns:
    A function of the same arguments and results.

  Raises:
    TypeError: f is no function, `argnums` are no places, or `recipe` is no
      CoatRecipe.
    ValueError: there are no `argnums`; or called with fewer positional
      arguments than `argnums` names.

  Source: arXiv:2410.19313 has the groups; the boundary of a checkpoint in FP8
    is not in it.

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
  op, remedy = "fp8_remat", "0 is the first argument"
  check_function(op, "f", f, "pass a function of arrays")
  is_one = not isinstance(argnums, tuple | list)
  places: Any = (argnums,) if is_one else tuple(argnums)
  if not places:
    rule = "at least one place"
    refuse(ValueError, op, "argnums", rule, argnums, "or use jax.checkpoint")
  for place in places:
    check_whole(op, "argnums", place, ANY, remedy)
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
    if not all(-len(args) <= i < len(args) for i in places):
      raise ValueError(
        f"fp8_remat: argnums {places} must be places of positional arguments, "
        f"got {len(args)} of them; pass what is rounded by position"
      )
    return saving(*args, **kwargs)

  return wrapped


def through_codes[Tree](tree: Tree, recipe: CoatRecipe) -> Tree:
  """Each float array as its 1 x G codes stand for it, with their gradient.

  Under a `jax.checkpoint` with the policy `codes_saveable` the codes and scales
  are kept in place of the array.
  """

  def of(x: Any) -> Any:
    x_type = jax.typeof(x)
    if not x_type.ndim or not jnp.issubdtype(x_type.dtype, jnp.floating):
      return x
    return _through_codes((x,), recipe)

  return jax.tree.map(of, tree)


def _fwd(x: Array, recipe: CoatRecipe):
  codes = ops.quantize_groups(
    x,
    group_size=recipe.group_size,
    dtype=recipe.formats.values,
    implementation=recipe.implementation,
  )
  codes = name_residual(_INPUT, codes)
  return dequantize(codes, group_size=recipe.group_size, dtype=x.dtype), ()


def _bwd(recipe, inputs, saved, g):
  del recipe, inputs, saved
  return (g,)


def _specs(x, recipe):
  each = tokens(recipe.axes, x)
  return (each,), each


_through_codes = rule(_fwd, _bwd, _specs)
