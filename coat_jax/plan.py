# SPDX-License-Identifier: Apache-2.0
"""How much memory a training step takes on each GPU, before there is one.

Nothing is compiled: weights, gradients and the optimizer's state are added up
from shapes and shardings, what layers remember and what a step needs for a
moment from the formulas below. docs/plan.md says what is counted, and how far
it is from XLA's own count.

A step is fullest at one of a few moments, each with what is alive then:

  loss       all that layers remember, and a chunk of logits
  backward   all that layers remember, the layers' gradients, and the arrays of
             the one layer that is being differentiated
  embedding  all gradients, the embedding's not yet summed; the optimizer, which
             works in place, needs no more
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from coat_jax.recipe import CoatRecipe

Remat = Literal["none", "dots", "full"]
_F32, _BF16, _FP8 = 4, 2, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderShape:
  """What of a decoder its memory depends on.

  Attributes:
    num_layers: decoder layers, scanned.
    d_model: width of the residual stream.
    d_ff: width of the gated MLP.
    num_heads: query heads.
    num_kv_heads: key and value heads.
    vocab_size: columns of the output projection.
    head_dim: width of a head; None for d_model / num_heads.
    is_layer_norm: norms subtract the mean, and remember one more number.
    norm_has_scale: norms have weights.
  """

  num_layers: int
  d_model: int
  d_ff: int
  num_heads: int
  num_kv_heads: int
  vocab_size: int
  head_dim: int | None = None
  is_layer_norm: bool = False
  norm_has_scale: bool = True

  @property
  def heads_width(self) -> int:
    """Columns of the queries."""
    return self.num_heads * (self.head_dim or self.d_model // self.num_heads)

  @property
  def qkv_width(self) -> int:
    """Columns of queries, keys and values."""
    width = self.heads_width // self.num_heads
    return self.heads_width + 2 * self.num_kv_heads * width

  @property
  def matrices(self) -> dict[str, int]:
    """Values of each weight of one layer."""
    return {
      "qkv": self.d_model * self.qkv_width,
      "out": self.heads_width * self.d_model,
      "gate_up": 2 * self.d_model * self.d_ff,
      "down": self.d_ff * self.d_model,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
  """What one GPU works on at a time, and how weights are split.

  Attributes:
    batch: sequences of a microbatch on this GPU; those that share `tensor` with
      it have the same.
    seq: tokens a sequence.
    fsdp: GPUs that a weight's rows are split over.
    tensor: GPUs that heads, columns and the vocabulary are split over.
    is_on_mesh: whether there are other GPUs.
    accumulate: microbatches of a step.
    loss_positions: of each sequence, whose logits are held at a time; None for
      all of them.
    remat: what `jax.checkpoint` keeps of a layer: "dots" the results of its
      products (`dots_with_no_batch_dims_saveable`), "full" its input alone.
  """

  batch: int
  seq: int
  fsdp: int = 1
  tensor: int = 1
  is_on_mesh: bool = False
  accumulate: int = 1
  loss_positions: int | None = None
  remat: Remat = "none"

  @property
  def tokens(self) -> int:
    """Tokens at a time."""
    return self.batch * self.seq


class Memory(NamedTuple):
  """Bytes on one GPU at one moment.

  Attributes:
    weights: f32 parameters.
    gradients: those that are there by then, with their sums over microbatches.
    optimizer: its state.
    activations: what layers remember.
    temporary: all else.
  """

  weights: int
  gradients: int
  optimizer: int
  activations: int
  temporary: int

  @property
  def total(self) -> int:
    """All of it."""
    return sum(self)


def device_bytes(tree: Any) -> int:
  """Bytes of a tree on one of the devices that its shardings name.

  Args:
    tree: of arrays or of `jax.ShapeDtypeStruct`s, such as
      `coat_jax.sharding.abstract_state` makes; one without a sharding counts
      in whole.

  Returns:
    The sum over its leaves.
  """

  def count(x) -> int:
    where = getattr(x, "sharding", None)
    shape = x.shape if where is None else where.shard_shape(x.shape)
    return math.prod(shape) * jnp.dtype(x.dtype).itemsize

  return sum(count(x) for x in jax.tree.leaves(tree))


def kept_bytes(
  shape: DecoderShape,
  recipe: CoatRecipe,
  *,
  remat: Remat = "none",
  tensor: int = 1,
) -> float:
  """Bytes per token and layer from the forward to the backward.

  Args:
    shape: of the decoder.
    recipe: of its layers.
    remat, tensor: see `Load`; the bytes are those of one GPU.

  Returns:
    All arrays that grow with the tokens, scales and statistics included, as XLA
    keeps them. Of recipe bf16 that is the attention's output twice, in its own
    layout and as an operand, and what a norm without weights divides once.
  """
  d, f, heads = shape.d_model, shape.d_ff, shape.heads_width
  # Of BF16 layers each GPU has all positions between products, and its columns.
  whole = 1 if recipe.linear == "bf16" else 1 / tensor
  if remat == "full":
    return whole * _BF16 * d
  if remat == "dots":  # The input, and what the products give but the last.
    return whole * _BF16 * 2 * d + _BF16 * (shape.qkv_width + 2 * f) / tensor
  attention = shape.qkv_width + heads
  log_sum_exp = _F32 * shape.num_heads
  if recipe.nonlinear == "bf16":
    operand = _BF16 if recipe.linear == "bf16" else _FP8
    norm = _F32 * (d * (2 if shape.norm_has_scale else 1) + 2) + operand * d
    inner = _BF16 * (attention + 5 * f) + log_sum_exp + operand * (heads + f)
    return 2 * whole * norm + inner / tensor

  def groups(width: int) -> int:  # Codes, and a BF16 scale for each group.
    return _FP8 * width + _BF16 * -(-width // recipe.group_size)

  statistics = _F32 * (2 if shape.is_layer_norm else 1)
  kept = 2 * (groups(d) + statistics) + 2 * groups(f) + log_sum_exp
  if recipe.attention == "fp8":
    width = heads // shape.num_heads
    kept += attention // width * groups(width)
  else:
    kept += _BF16 * attention
  if recipe.residuals == "coat":  # Norm outputs, SiLU and the product too.
    kept += groups(f) + _FP8 * (2 * d + f)
  return kept / tensor


def plan_step(
  shape: DecoderShape,
  recipe: CoatRecipe,
  load: Load,
  *,
  params: Any,
  optimizer_state: Any,
) -> dict[str, Memory]:
  """Plans the memory of a training step on one GPU.

  The step is one with f32 parameters and gradients, layers in a `lax.scan`,
  the loss in chunks of logits, and donated state, as `train.step` has it.

  Args:
    shape: of the decoder.
    recipe: of its layers.
    load: of the GPU.
    params, optimizer_state: trees of `jax.ShapeDtypeStruct`s with shardings, as
      `coat_jax.sharding.abstract_state` makes them.

  Returns:
    What is there at each of the moments "loss", "backward" and "embedding";
    `fullest` picks the peak.

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
  weights, optimizer = device_bytes(params), device_bytes(optimizer_state)
  parts = load.fsdp * load.tensor
  layers = shape.num_layers * sum(shape.matrices.values())
  kept = kept_bytes(shape, recipe, remat=load.remat, tensor=load.tensor)
  kept = shape.num_layers * kept * load.tokens
  # Between microbatches their sum is kept.
  summed = weights if load.accumulate > 1 else 0
  if recipe.linear == "bf16" and not load.is_on_mesh and load.remat == "none":
    kept += _BF16 * layers  # Autodiff keeps the casts of weights.
  cached = 0
  if recipe.linear == "fp8" and recipe.weight_cache == "codes":
    # Columns are dead after the only forward of a step, rows are not.
    layouts = 1 if load.accumulate == 1 else 2
    cached = layouts * _FP8 * layers / parts
  ends = _Ends(shape, load)
  backward = _layer_backward(shape, recipe, load) + ends.in_backward

  def memory(gradients, activations, temporary):
    others = (round(x) for x in (activations, temporary))
    return Memory(weights, round(gradients + summed), optimizer, *others)

  return {
    "loss": memory(0, kept, ends.in_loss + cached),
    "backward": memory(_F32 * layers / parts, kept, backward + cached),
    "embedding": memory(weights, 0, ends.in_embedding + cached),
  }


def fullest(moments: dict[str, Memory]) -> tuple[str, Memory]:
  """Picks the moment with the most memory, and its name."""
  return max(moments.items(), key=lambda moment: moment[1].total)


def largest_batch(plan_of: Callable[[int], Memory], memory_bytes: int) -> int:
  """Finds the most sequences on a GPU that fit.

  Args:
    plan_of: the peak of so many sequences.
    memory_bytes: of the GPU.

  Returns:
    The most; 0 where not even one fits.
  """
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
  """The embedding and the loss: what they need at each moment."""

  def __init__(self, shape: DecoderShape, load: Load):
    # Values of the output weights with all their rows.
    head = shape.d_model * shape.vocab_size / load.tensor
    unit = _BF16 * shape.d_model * load.tokens
    logits = (
      load.batch
      * (load.loss_positions or load.seq)
      * shape.vocab_size
      / load.tensor
    )
    # Logits; their gradient, and the weights, in BF16; the weights' gradient;
    # hidden states, those in chunks, and their gradient.
    self.in_loss = (_F32 + _BF16) * (logits + head) + 3 * unit
    # The weights' gradient, which XLA sums over devices at the end of the step.
    self.in_backward = _F32 * head
    # The embedding's too, in BF16 and in f32.
    self.in_embedding = _BF16 * head
    if load.is_on_mesh:
      self.in_embedding += _F32 * head


def _layer_backward(
  shape: DecoderShape, recipe: CoatRecipe, load: Load
) -> float:
  """What the backward of one layer needs beside what all layers remember."""
  tokens, f = load.tokens, shape.d_ff / load.tensor
  unit = _BF16 * shape.d_model * tokens / load.tensor
  weights = {k: v / load.tensor for k, v in shape.matrices.items()}
  every, gate_up = sum(weights.values()), weights["gate_up"]
  # Of weights, what one device has and what it gathers.
  gathered = 1 + 1 / load.fsdp if load.is_on_mesh else 0
  again = 0.0
  if load.remat == "full":
    again = kept_bytes(shape, recipe, tensor=load.tensor) * tokens
  if recipe.linear == "bf16":
    if not load.is_on_mesh:
      # Both gradients of the MLP's inside; the weight of gate and up.
      return again + _BF16 * (3 * f * tokens + gate_up) + 2 * unit
    # The MLP: gradients of gate and up, of their product, and the product, with
    # the gathered weight. Attention: q, k, v, its output and all gradients.
    mlp = _BF16 * (4 * f * tokens + gathered * gate_up)
    attention = _BF16 * (3 * f * tokens + gathered * weights["qkv"]) + 6 * unit
    return again + max(mlp, attention) + 10 * unit
  # Gradients of weights, in f32: XLA makes them last, all four; on a mesh it
  # sums them over devices in the next layer's time.
  last = _F32 * every + 2 * f * tokens + 1.5 * unit
  if recipe.nonlinear == "bf16":
    # Gradients of gate and up in BF16, and in E5M2 as rows and as columns.
    mlp = 8 * f * tokens + 1.5 * unit
    if load.is_on_mesh:
      return again + _F32 * every + gathered * gate_up + mlp
    return again + max(mlp, _F32 * gate_up + 4 * f * tokens + 2 * unit)
  # The product's gradient in BF16, E5M2 of gate and up as rows and as columns,
  # the product again; with all that the layer remembers, copied.
  mlp = 7 * f * tokens + 1.5 * unit
  if load.is_on_mesh:
    kept = 2.25 * f * tokens + 0.5 * unit
    return again + _F32 * every + gathered * gate_up + mlp + kept
  kept = kept_bytes(shape, recipe, remat=load.remat) * tokens
  return again + max(mlp + kept, last)
