# SPDX-License-Identifier: Apache-2.0
"""`encoded` wraps any optax optimizer to store its moments in FP8."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path
from jax.typing import ArrayLike

from coat_jax import codecs
from coat_jax.numerics.checks import check_function
from coat_jax.optimizer import arguments
from coat_jax.optimizer.boxes import mesh_of
from coat_jax.optimizer.conversion import decode_state, encode_state
from coat_jax.optimizer.fields import (
  FieldRule,
  default_field_rule,
  find_fields,
  mark_placeholders,
)
from coat_jax.optimizer.masks import QuantizeMask, leaf_paths, node_path
from coat_jax.optimizer.state import (
  EncodedState,
  check_state,
  moments_in,
  placeholder_type,
  zero_moment,
)
from coat_jax.optimizer.weights import in_f32


def encoded(
  inner: optax.GradientTransformation,
  codec: codecs.MomentCodec = codecs.coat(),  # noqa: B008 (it is frozen)
  *,
  fields: FieldRule = default_field_rule,
  quantize_mask: QuantizeMask | None = None,
  seed: ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
  """Stores the moments of any optax optimizer in FP8.

  The codec encodes the fields of the inner optimizer's state that contain an
  array for every parameter, such as a momentum or second moments. A step
  decodes these fields to f32, runs the inner optimizer, and encodes the new
  fields. Gradients and parameters are also cast to f32, so the inner optimizer
  always computes in f32.

  Args:
    inner: any optax optimizer or chain, such as `optax.contrib.muon(1e-2)`. Its
      fields must be in f32, so do not set its `mu_dtype`.
    codec: a codec from `codecs`. Its `nu` encodes fields that are never
      negative; its `mu` encodes all others.
    fields: a function from a field's path, such as "0/mu", to "mu", "nu" or
      None. It chooses which part of the codec encodes the field; None leaves
      the field unchanged. By default, every field with the structure and shapes
      of the parameters is encoded. The exceptions are copies of the parameters,
      Adafactor's second moments, and the fields of COCOB, MADGRAD and
      `rmsprop(centered=True)` that must stay in f32.
    quantize_mask, seed: as for `coat_adamw`.

  Returns:
    An `optax.GradientTransformationExtraArgs` with an `EncodedState`. An update
    has the dtype to which gradient and parameter promote. Jit `init`, which
    otherwise allocates all fields in f32 before it encodes them.

  Raises:
    TypeError: `inner` is not an optimizer, `codec` is not a `MomentCodec`, or
      `fields` is not a function; otherwise the same as for
      `scale_by_coat_adam`.
    ValueError: (by `init`) `fields` selects a field that must stay in f32, or
      returns anything but "mu", "nu" or None; there is no field to encode; a
      field is not in f32; (by `update`) the state was made with another codec
      or for other parameters.

  Examples:
    >>> import jax, optax
    >>> import jax.numpy as jnp
    >>> from coat_jax import codecs, encoded
    >>> solver = encoded(optax.lion(1e-4), codecs.coat())
    >>> state = jax.jit(solver.init)({"w": jnp.ones((64, 128))})
    >>> print(state.inner[0].mu.codes["w"].dtype)
    float8_e4m3fn

  Source: arXiv:2410.19313, section 4, which encodes the moments of Adam only.
  """
  op = "encoded"
  arguments.check_codec(op, codec)
  arguments.check_hyperparameters(op, seed=seed)
  check_function(
    op, "fields", fields, "pass a rule: path -> 'mu', 'nu' or None"
  )
  arguments.check_optimizer(op, "inner", inner)
  inner = optax.with_extra_args_support(inner)

  def init_fn(params):
    count = jnp.zeros([], jnp.int32)
    if isinstance(params, placeholder_type()):
      state = mark_placeholders(op, inner.init, params, codec, fields)
      return EncodedState(count, state)
    chosen = arguments.choose_leaves(op, params, quantize_mask)
    where = mesh_of(params)
    params = _in_f32(params)
    state = inner.init(params)
    found, treedef = find_fields(op, state, params, fields)
    keys = [keys for keys, _ in tree_leaves_with_path(params)]
    is_chosen = dict(zip(keys, chosen, strict=True))

    def zeros(field):
      own = [is_chosen[keys] for keys, _ in tree_leaves_with_path(field.node)]
      return zero_moment(field.node, getattr(codec, field.kind), own, where)

    like = treedef.unflatten(zeros(x) if x.kind else x.node for x in found)
    # Without barriers, XLA spends half a minute on folding constants. In JAX
    # 0.11.0, each output of a barrier varies over the mesh axes of all its
    # inputs, so each array gets a separate barrier.
    barrier = functools.partial(jax.tree.map, jax.lax.optimization_barrier)
    nodes = [barrier(x.node) if x.kind else x.node for x in found]
    state = treedef.unflatten(nodes)
    return EncodedState(count, encode_state(op, "state", like, state, seed, 0))

  def update_fn(updates, state, params=None, **extra_args):
    check_state(op, state, EncodedState, codec)
    count = optax.safe_increment(state.count)
    arguments.check_gradients(op, leaf_paths(updates))
    _check_leaves(op, updates, state)
    updates = arguments.promoted(op, updates, params)
    new_updates, new_inner = inner.update(
      _in_f32(updates),
      decode_state(state.inner),
      _in_f32(params),
      **extra_args,
    )
    new_inner = encode_state(op, "state", state.inner, new_inner, seed, count)
    new_updates = jax.tree.map(
      lambda update, g: update.astype(g.dtype), new_updates, updates
    )
    return new_updates, EncodedState(count, new_inner)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_leaves(op: str, updates: Any, state: EncodedState) -> None:
  """Raises a ValueError if gradients do not have the shapes in the state."""
  shapes = {keys: g.shape for keys, g in tree_leaves_with_path(updates)}
  for moment in moments_in(state):
    paths = tree_leaves_with_path(moment.codes)
    for (keys, _), shape in zip(paths, moment.shapes(), strict=True):
      if (got := shapes.get(keys, "no leaf")) != shape:
        raise ValueError(
          f"{op}: gradients must have the shapes of the parameters given to "
          f"init, got {got} for {shape} at {node_path(keys)!r}; call init "
          "with the parameters of these gradients"
        )


def _in_f32(tree: Any) -> Any:
  """Casts floating leaves to f32 and complex leaves to complex64."""

  def cast(x):
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
      return x
    if isinstance(x, jax.ShapeDtypeStruct):
      return jax.eval_shape(in_f32, x)
    return in_f32(jnp.asarray(x))

  return jax.tree.map(cast, tree)
