# SPDX-License-Identifier: Apache-2.0
"""The middle of an attention block: heads, their norm, RoPE and attention."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, P, lax

from coat_jax import ops
from coat_jax.layers.dot_product_attention import (
  AttentionInputs,
  Kinds,
  attend,
  attend_backward,
  attention_rule,
  inputs_specs,
)
from coat_jax.layers.middle import Middle, MiddleGradient, MiddleOutput
from coat_jax.layers.module import check_float
from coat_jax.layers.operands import (
  gradient_operand,
  gradient_scaling,
  in_groups,
  quantized,
  scale_of,
)
from coat_jax.layers.qk_norm import QKNorm, QKNormWeights
from coat_jax.layers.residuals import residual_scope, save_residual
from coat_jax.layers.rope import (
  Heads,
  check_positions,
  rope,
  split_heads,
  split_own_heads,
)
from coat_jax.mesh import run_whole, spec_of
from coat_jax.numerics.checks import (
  POSITIVE,
  Range,
  check_kind,
  check_number,
  check_whole,
)
from coat_jax.numerics.qtensor import QTensor
from coat_jax.ops import AttentionResiduals
from coat_jax.ops.rope import (
  RopeScaling,
  Rotary,
  Theta,
  Thetas,
  rotate,
  rotate_back,
  rotation,
)

# Scanned layers share one program. An option that differs between them is
# therefore a tuple with one entry for each kind of layer, indexed by an int32.
type Windows = int | tuple[int | None, ...] | None
type Bases = float | tuple[float | None, ...] | None
type Scalings = RopeScaling | tuple[RopeScaling | None, ...] | None


class _Saved(NamedTuple):
  heads: tuple[Array | QTensor, ...]  # q, k and v; q and k not yet normalized.
  kept: AttentionResiduals
  out_scale: Array | None  # See `scale_of`.
  inputs: AttentionInputs
  inside: Array | None  # One bit per value: 1 if clipping kept the value.


@dataclasses.dataclass(frozen=True)
class SelfAttention(Middle):
  """Clips q, k and v, normalizes and rotates q and k, and runs attention.

  The first weight is [D, (N + 2 K) H], with columns ordered by key head (see
  `layers.split_heads`); the second is [N H, D]. `weights` are `QKNormWeights`,
  or None if q and k are not normalized. `inputs` are `AttentionInputs`.

  If layers of a stack differ in RoPE or in the keys that queries see,
  `heads.theta` or `kind` is a tuple, and `inputs.kind` selects an entry.

  If q and k are normalized, their values before the norm are saved in FP8, and
  recipe.attention selects only how v is saved.

  Attributes:
    heads: the numbers of heads, N and K, and RoPE's options.
    kind: which keys a query sees, and how scores are scaled and capped.
    clip: q, k and v are clipped to [-clip, clip]; None for no clipping.
    qk_norm: the norm of q and k, or None.

  Raises:
    TypeError: `heads` are not `Heads`, or `clip` is not a number.
    ValueError: `clip` is not above 0.
  """

  heads: Heads
  kind: Kinds = ops.AttentionKind()
  clip: float | None = None
  qk_norm: QKNorm | None = None

  def __post_init__(self):
    op = "SelfAttention"
    check_kind(
      op, "heads", self.heads, Heads, "pass one, as in Heads(32, 8, 1e4)"
    )
    if self.clip is not None:
      remedy = "pass None to leave q, k and v unchanged"
      check_number(op, "clip", self.clip, POSITIVE, remedy)

  @property
  def num_kinds(self) -> int:
    """The number of kinds of layers that `kind` and RoPE's bases describe."""
    return count_kinds(windows=self.kind, theta=self.heads.theta)

  def check(self, x, weights, inputs, recipe):
    op, remedy = "SelfAttention", "pass AttentionInputs(jnp.arange(T))"
    check_kind(op, "inputs", inputs, AttentionInputs, remedy)
    check_float(op, "x", x, ndim=3)
    check_positions(op, inputs.positions, x)
    if not recipe.axes:
      self.heads.check_columns(op, weights.front.w.shape[-1])
    if self.num_kinds > 1:
      last = self.num_kinds - 1
      remedy = f"pass the index of this layer's kind, from 0 to {last}"
      check_whole(op, "kind", inputs.kind, Range(0, last), remedy)

  def plain(self, h, weights, inputs, recipe):
    clip = functools.partial(_clip, limit=self.clip)
    clipped: Any = run_whole(clip, h, out_specs=spec_of(h))
    positions, _, kind = inputs
    q, k, v = split_heads(
      clipped, positions, self._split, kind=kind, recipe=recipe
    )
    if self.qk_norm is not None:
      q, k = self._plain_norms(q, k, weights)
      if (theta := self.heads.theta) is not None:
        q = rope(q, positions, theta=theta, kind=kind)
        k = rope(k, positions, theta=theta, kind=kind)
    inputs = inputs._replace(positions=None)
    return _merge_heads(attention_rule((q, k, v, inputs), self.kind, recipe))

  def _plain_norms(self, q, k, weights):
    norm = self.qk_norm
    assert norm is not None

    def plain(x, weight):
      x = save_residual("norm", x)
      with residual_scope("norm"):
        return norm.normalized(x, weight).astype(x.dtype)

    return (
      run_whole(plain, q, weights.q, out_specs=spec_of(q)),
      run_whole(plain, k, weights.k, out_specs=spec_of(k)),
    )

  def forward(self, h, weights, inputs, recipe):
    h, inside = _clip_fwd(h, self.clip)
    inputs = AttentionInputs(
      save_residual("rope", inputs.positions),
      *save_residual("attention", inputs[1:]),
    )
    positions, _, kind = inputs
    q, k, v = split_own_heads(h, positions, kind, self._split, recipe.axes)
    in_fp8 = recipe.attention == "fp8"
    # Don't name these values "norm", even if a norm reads them: policies that
    # keep the inputs of blocks' norms should not keep these values.
    saved = save_residual(
      "attention",
      (
        in_groups(q, recipe) if in_fp8 or self.qk_norm else q,
        in_groups(k, recipe) if in_fp8 or self.qk_norm else k,
        in_groups(v, recipe) if in_fp8 else v,
      ),
    )
    heads = self._read(saved, weights, inputs, h.dtype, recipe)
    kept = attend(heads, inputs, self.kind, recipe)
    out = quantized(_merge_heads(kept.out), recipe)
    saved = _Saved(saved, kept, scale_of(out), inputs, inside)
    # The gather of the second weight's codes waits for q, not for q in FP8.
    return MiddleOutput(out, saved, after=q)

  def columns(self, saved, recipe):
    out = _merge_heads(saved.kept.out)
    return quantized(out, recipe, scale=saved.out_scale, layout="columns")

  def backward(self, saved, dout, weights, recipe, *, has_bias):
    inputs, kept, dtype = saved.inputs, saved.kept, dout.dtype
    heads = self._read(saved.heads, weights, inputs, dtype, recipe)
    dout = dout.reshape(kept.out.shape)
    gradients = attend_backward(dout, heads, kept, inputs, self.kind, recipe)
    dweights = None
    if self.qk_norm is not None:
      gradients, dweights = self._norm_gradients(
        saved, gradients, weights, recipe
      )
    angles = _angles(inputs, dout.shape[-1], self._split)
    scaling = gradient_scaling(recipe)
    # `join_heads_operand` cannot clip, and supports only `PerTensor`.
    if self.clip is None and type(scaling) is ops.PerTensor:
      dh, sums = ops.join_heads_operand(
        *gradients,
        *angles,
        gradient=scaling,
        has_sums=has_bias,
        implementation=recipe.implementation,
      )
      return MiddleGradient(dh, None, sums, dweights)
    values = ops.join_heads(*gradients, *angles)
    values = _clip_bwd(self.clip, saved.inside, values)[0]
    return MiddleGradient(
      gradient_operand(values, recipe), None, values, dweights
    )

  def specs(self, axes, weights, inputs):
    of_weights = P() if self.qk_norm is None else self.qk_norm.spec(axes)
    return of_weights, inputs_specs(axes, inputs)

  def _read(self, saved, weights, inputs, dtype, recipe):
    """Computes attention's q, k and v from the saved values."""

    def read(x):
      return x.dequantize(dtype) if isinstance(x, QTensor) else x

    norm = self.qk_norm
    if norm is None:
      return tuple(map(read, saved))
    q, k, v = saved
    angles = _angles(inputs, q.qvalue.shape[-1], self.heads)

    def turned(codes, weight):
      y = norm.normalized(codes.dequantize(), weight, recipe.axes)
      return rotate(y, *angles).astype(dtype)

    return turned(q, weights.q), turned(k, weights.k), read(v)

  def _norm_gradients(self, saved, gradients, weights, recipe):
    """Computes the gradients of the norm's inputs and weights."""
    norm = self.qk_norm
    assert norm is not None
    dq, dk, dv = gradients
    angles = _angles(saved.inputs, dq.shape[-1], self.heads)

    def before(dy, codes, weight):
      # Without the barrier, XLA would rotate dy again in each of the three
      # fusions that read it.
      dy = rotate_back(dy.astype(jnp.float32), *angles).astype(dq.dtype)
      dy = lax.optimization_barrier(dy)
      dx, dweight = norm.gradients(dy, codes.dequantize(), weight, recipe.axes)
      return dx.astype(dq.dtype), dweight

    dq, dq_weight = before(dq, saved.heads[0], weights.q)
    dk, dk_weight = before(dk, saved.heads[1], weights.k)
    return (dq, dk, dv), QKNormWeights(dq_weight, dk_weight)

  @property
  def _split(self) -> Heads:
    """The heads that h is split into, without RoPE if a norm comes first."""
    return self.heads._replace(theta=None) if self.qk_norm else self.heads


def _angles(inputs, head_dim, heads):
  return rotation(
    inputs.positions, head_dim=head_dim, theta=heads.theta, kind=inputs.kind
  )


def _merge_heads(x: Array) -> Array:
  """Reshapes [B, T, N, H] to [B, T, N H]."""
  b, t, n, h = x.shape
  return x.reshape(b, t, n * h)


@functools.partial(jax.custom_vjp, nondiff_argnames=("limit",))
def _clip(x, limit):
  return _clip_fwd(x, limit)[0]


def _clip_fwd(x, limit):
  if limit is None:
    return x, None
  # Save one bit per value. Autodiff would save two BF16 arrays.
  inside = jnp.packbits(jnp.abs(x) <= limit, axis=-1)
  return jnp.clip(x, -limit, limit), save_residual("attention", inside)


def _clip_bwd(limit, inside, g):
  if limit is None or not g.size:  # unpackbits does not support empty arrays.
    return (g,)
  passes = jnp.unpackbits(inside, axis=-1, count=g.shape[-1])
  return (jnp.where(passes == 1, g, 0),)


_clip.defvjp(_clip_fwd, _clip_bwd)


def count_kinds(**choices) -> int:
  """Returns the common length of the tuples in `choices`; 1 without tuples."""
  lengths = {n: len(x) for n, x in choices.items() if isinstance(x, tuple)}
  if len(set(lengths.values())) > 1 or 0 in lengths.values():
    raise ValueError(
      "attention: tuples must have one entry for each kind of layer, got "
      f"{lengths} entries; pass nonempty tuples of the same length"
    )
  return max(lengths.values(), default=1)


def attention_kinds(
  causal: bool,
  window: Windows,
  soft_cap: float | None,
  scale: float | None,
) -> Kinds:
  """Makes one `AttentionKind`, or one for each window if they differ."""
  windows = window if isinstance(window, tuple) else (window,)
  return _one_or_each(
    tuple(ops.AttentionKind(causal, x, soft_cap, scale) for x in windows)
  )


def rotaries(
  theta: Bases, scaling: Scalings, rotary_dim: int | None, *, head_dim: int
) -> Thetas:
  """Makes one `Rotary`, or one for each kind of layer if they differ."""
  count = count_kinds(rope_theta=theta, rope_scaling=scaling)
  thetas = theta if isinstance(theta, tuple) else (theta,) * count
  scalings = scaling if isinstance(scaling, tuple) else (scaling,) * count
  needs_rope = any(x is not None for x in (rotary_dim, *scalings))
  if needs_rope and all(x is None for x in thetas):
    raise ValueError(
      "Attention: rope_scaling and rotary_dim need RoPE, got "
      f"{scaling} and {rotary_dim} with rope_theta {theta}; pass rope_theta, "
      "RoPE's base"
    )

  def one(theta, scaling) -> Theta:
    if theta is None:
      return None
    rotary = Rotary(theta, scaling, rotary_dim)
    rotary.check(head_dim)
    return rotary

  return _one_or_each(tuple(map(one, thetas, scalings)))


def _one_or_each(choices: tuple):
  """Returns the choice that all kinds share, or the tuple."""
  return choices[0] if len(set(choices)) == 1 else choices
