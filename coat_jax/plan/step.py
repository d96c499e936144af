# SPDX-License-Identifier: Apache-2.0
"""Plans the memory of a whole step at the points where it may peak."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coat_jax.checks import (
  NOT_NEGATIVE,
  check_function,
  check_kind,
  check_number,
  refuse,
)
from coat_jax.plan.backward import layer_backward
from coat_jax.plan.decoder import (
  BF16,
  F32,
  FP8,
  DecoderShape,
  Load,
  check_shape,
  kept_bytes,
)
from coat_jax.recipe import CoatRecipe


class Memory(NamedTuple):
  """Bytes on one GPU at one point of a step.

  Attributes:
    weights: bytes of the parameters.
    gradients: bytes of the gradients that exist at that point, plus their sums
      over microbatches. If the optimizer runs in the backward, the gradients of
      a single layer count as temporary.
    optimizer: bytes of the optimizer's state.
    activations: bytes that layers save for the backward pass.
    temporary: everything else.
  """

  weights: int
  gradients: int
  optimizer: int
  activations: int
  temporary: int

  @property
  def total(self) -> int:
    """The total number of bytes."""
    return sum(self)


def device_bytes(tree: Any) -> int:
  """Counts the bytes of a tree on one device of its shardings.

  Args:
    tree: arrays or `jax.ShapeDtypeStruct`s, such as
      `coat_jax.sharding.abstract_state` returns; one without a sharding counts
      in full.

  Returns:
    The sum over the leaves.

  Raises:
    TypeError: a leaf is not an array.
  """

  def count(x) -> int:
    if not hasattr(x, "shape"):
      remedy = "pass arrays, or jax.eval_shape of them"
      refuse(TypeError, "device_bytes", "tree", "a tree of arrays", x, remedy)
    where = getattr(x, "sharding", None)
    shape = x.shape if where is None else where.shard_shape(x.shape)
    return math.prod(shape) * jnp.dtype(x.dtype).itemsize

  return sum(count(x) for x in jax.tree.leaves(tree))


def plan_step(
  shape: DecoderShape,
  recipe: CoatRecipe,
  load: Load,
  *,
  params: Any,
  optimizer_state: Any,
) -> dict[str, Memory]:
  """Plans the memory of a training step on one GPU.

  The step runs its layers in a `lax.scan`, has gradients in the dtypes of the
  parameters, computes the loss in chunks of logits and donates its state, as
  `train.step` does.

  Args:
    shape: the decoder's dimensions.
    recipe: the recipe of its layers.
    load: the work of the GPU.
    params, optimizer_state: trees of `jax.ShapeDtypeStruct`s with shardings, as
      `coat_jax.sharding.abstract_state` returns them.

  Returns:
    The memory at each of the points "loss", "backward" and "embedding";
    `fullest` picks the peak.

  Raises:
    TypeError: an argument of another kind.
    ValueError: no parameters.

  Examples:
    >>> import jax
    >>> from coat_jax import coat_adamw, recipe
    >>> from coat_jax.plan import DecoderShape, Load, fullest, plan_step
    >>> shape = DecoderShape(
    ...   num_layers=2,
    ...   d_model=256,
    ...   d_ff=768,
    ...   num_heads=4,
    ...   num_kv_heads=4,
    ...   vocab_size=1024,
    ... )
    >>> params = {"layers": jax.ShapeDtypeStruct((2, 851968), "float32")}
    >>> state = jax.eval_shape(coat_adamw(1e-3).init, params)
    >>> moments = plan_step(
    ...   shape,
    ...   recipe.coat(),
    ...   Load(batch=8, seq=512),
    ...   params=params,
    ...   optimizer_state=state,
    ... )
    >>> moment, memory = fullest(moments)
    >>> print(moment, round(memory.total / 1e6))
    backward 97
  """
  op = "plan_step"
  check_shape(op, shape, recipe)
  check_kind(op, "load", load, Load, "pass one, as in Load(batch=8, seq=2048)")
  if not jax.tree.leaves(params):
    remedy = "pass the shapes of all weights"
    refuse(ValueError, op, "params", "a tree of arrays", params, remedy)
  weights, optimizer = device_bytes(params), device_bytes(optimizer_state)
  parts = load.fsdp * load.tensor
  layers = shape.num_layers * sum(shape.matrices.values())
  kept = kept_bytes(shape, recipe, remat=load.remat, tensor=load.tensor)
  kept = shape.num_layers * kept * load.tokens
  value = value_bytes(params)
  # The sum of gradients over microbatches is kept between them.
  summed = 0
  if load.accumulate > 1:
    summed = weights * max(1, jnp.dtype(load.sums_dtype).itemsize / value)
  is_cast = recipe.linear == "bf16" and value == F32
  linear = layers
  if shape.num_experts:  # We cache nothing for experts and keep no cast.
    of_layer = shape.matrices
    linear = shape.num_layers * (of_layer["qkv"] + of_layer["out"])
  if is_cast and not load.is_on_mesh and load.remat == "none":
    kept += BF16 * linear  # Autodiff keeps the casts of weights.
  cached = 0
  if recipe.linear == "fp8" and recipe.weight_cache == "codes":
    # If a step has only one forward, columns are dead after it; rows are not.
    layouts = 1 if load.accumulate == 1 else 2
    cached = layouts * FP8 * linear / parts
  ends = _Ends(shape, load, value)
  backward = layer_backward(shape, recipe, load, value=value)
  backward += ends.in_backward
  of_layers, of_all = value * layers / parts, weights
  if load.optimizer_in_backward:
    of_layers, of_all = 0, value * ends.head / load.fsdp

  def memory(gradients, activations, temporary):
    others = (round(x) for x in (activations, temporary))
    return Memory(weights, round(gradients + summed), optimizer, *others)

  return {
    "loss": memory(0, kept, ends.in_loss + cached),
    "backward": memory(of_layers, kept, backward + cached),
    "embedding": memory(of_all, 0, ends.in_embedding + cached),
  }


def fullest(moments: dict[str, Memory]) -> tuple[str, Memory]:
  """Picks the point with the most memory; returns its name too.

  Raises:
    TypeError: `moments` is no dict.
    ValueError: it is empty.
  """
  remedy = "pass what plan_step returned"
  check_kind("fullest", "moments", moments, dict, remedy)
  if not moments:
    refuse(ValueError, "fullest", "moments", "not empty", moments, remedy)
  return max(moments.items(), key=lambda moment: moment[1].total)


def largest_batch(plan_of: Callable[[int], Memory], memory_bytes: int) -> int:
  """Finds the largest number of sequences that fits on a GPU.

  Args:
    plan_of: returns the peak memory for a number of sequences.
    memory_bytes: the GPU's memory.

  Returns:
    The largest number; 0 if not even one sequence fits.

  Raises:
    TypeError: `plan_of` is not a function, or `memory_bytes` not a number.
    ValueError: `memory_bytes` is negative or not finite.
  """
  op, remedy = "largest_batch", "pass a function of the batch"
  check_function(op, "plan_of", plan_of, remedy)
  remedy = "80e9 is a card of 80 GB"
  check_number(op, "memory_bytes", memory_bytes, NOT_NEGATIVE, remedy)

  fits = lambda batch: plan_of(batch).total <= memory_bytes  # noqa: E731
  if not fits(1):
    return 0
  low, high = 1, 2
  while fits(high):
    low, high = high, 2 * high
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if fits(middle) else (low, middle)
  return low


class _Ends:
  """The memory that the embedding and the loss need at each point.

  Attributes:
    head: number of values of the output weights, with all rows.
    in_loss, in_backward, in_embedding: bytes at these points.
  """

  def __init__(self, shape: DecoderShape, load: Load, value: int):
    self.head = head = shape.d_model * shape.vocab_size / load.tensor
    unit = BF16 * shape.d_model * load.tokens
    logits = (
      load.batch
      * (load.loss_positions or load.seq)
      * shape.vocab_size
      / load.tensor
    )
    # Logits and their gradient in BF16; the weights' gradient; hidden states,
    # the same in chunks, and their gradient.
    self.in_loss = (F32 + BF16) * logits + F32 * head + 3 * unit
    if value == F32 or load.is_on_mesh:
      # The weights in BF16, gathered if there is a mesh.
      self.in_loss += BF16 * head
    if value == BF16 and not load.is_on_mesh:
      # The gradient is rounded once the logits are gone.
      self.in_loss = max(self.in_loss, (F32 + BF16) * head + 2 * unit)
    # The weights' gradient, which by then is summed over devices.
    self.in_backward = value * head / load.fsdp
    if load.optimizer_in_backward:
      # The optimizer has used it already, unless the embedding's gradient must
      # be added. XLA may create zeros for that one before it differentiates the
      # layers.
      self.in_backward *= shape.tied_embeddings
      self.in_backward += BF16 * head
    # The embedding's gradient as well, in BF16 and in f32.
    self.in_embedding = BF16 * head
    if load.is_on_mesh:
      self.in_embedding += F32 * head


def value_bytes(params: Any) -> int:
  """Returns the bytes per value of a matrix; norms and biases may be wider."""
  largest = max(jax.tree.leaves(params), key=lambda leaf: leaf.size)
  return jnp.dtype(largest.dtype).itemsize
