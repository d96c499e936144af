# SPDX-License-Identifier: Apache-2.0
"""Any optax optimizer with what it keeps of parameters stored in a codec."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from coat_jax import codecs
from coat_jax.optimizer import moments
from coat_jax.optimizer.arguments import check_hyperparameters, check_optimizer
from coat_jax.optimizer.fields import (
  EncodedState,
  FieldRule,
  check_names,
  find_fields,
  is_field,
  mark_placeholders,
  path_of,
  rule_of,
)
from coat_jax.optimizer.masks import QuantizeMask, leaf_paths
from coat_jax.optimizer.state import (
  check_codec,
  check_gradients,
  check_state,
  placeholder_type,
)
from coat_jax.optimizer.stored_fields import (
  StoredFields,
  encode_fields,
  groups_of,
  rows_of,
  stored_fields,
)


def encoded(
  inner: optax.GradientTransformation,
  codec: codecs.MomentCodec = codecs.coat(),  # noqa: B008 (it is frozen)
  *,
  fields: FieldRule | Collection[str] | None = None,
  quantize_mask: QuantizeMask | None = None,
  seed: ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
  """Any optax optimizer with its moments in FP8.

  What the inner optimizer keeps of every parameter, such as a momentum or
  second moments, is stored in the codec between steps. In a step it is decoded
  to f32, the inner optimizer updates it, and it is encoded again: nothing but
  the state is rounded.

  The inner optimizer works in f32 whatever the parameters' dtype is; gradients
  and parameters are cast for it.

  Args:
    inner: such as `optax.lion(1e-4)`, a chain, or `optax.contrib.muon(1e-2)`.
      It must keep fields in f32: leave its `mu_dtype` out.
    codec: how fields are stored, from `codecs`: its `nu` for fields that are
      never negative, its `mu` for all others.
    fields: which fields are encoded, and how. None for `default_field_rule`:
      all whose structure and shapes are the parameters', except copies of
      parameters, and fields that must stay in f32: those of COCOB, MADGRAD and
      `optax.scale_by_stddev` (`rmsprop(centered=True)`). Or their names,
      such as `("mu",)`; or names and kinds, such as
      `{"m": "mu", "n": "nu"}`; or a rule, `path -> "mu", "nu" or None`. A name
      is the last part of a path, or all of it ("0/mu").
    quantize_mask: `(path, leaf) -> bool`, which leaves the codec encodes (the
      others' fields stay f32); None for `default_quantize_mask`.
    seed: of the random words of stochastic rounding.

  Returns:
    An `optax.GradientTransformationExtraArgs` with an `EncodedState`. Updates
    have the dtype of the gradients and the parameters together. Jit its
    `init`: else it makes all fields in f32 before it encodes them.

  Raises:
    TypeError: `inner` is no optimizer; `codec` is not a `MomentCodec`; `fields`
      is one name; or, by `init`, a leaf is neither floating nor complex, or
      `quantize_mask` chooses a complex one; or, by `update`, the state is
      another optimizer's.
    ValueError: (by `init`) a field that is named is not there, or is not like
      the parameters, or must stay in f32; there is none to encode, or
      one is not in f32; (by `update`) the state is not this codec's or these
      leaves'.

  Examples:
    >>> import jax, optax
    >>> import jax.numpy as jnp
    >>> from coat_jax import codecs, encoded
    >>> solver = encoded(optax.lion(1e-4), codecs.coat())
    >>> state = jax.jit(solver.init)({"w": jnp.ones((64, 128))})
    >>> print(state.inner[0].mu.mu_codes["w"].dtype)
    float8_e4m3fn

  Source: arXiv:2410.19313, section 4, whose codec is Adam's alone.
  """
  op = "encoded"
  check_codec(op, codec)
  check_hyperparameters(op, seed=seed)
  rule = rule_of(op, fields)
  check_optimizer(op, "inner", inner)
  inner = optax.with_extra_args_support(inner)

  def init_fn(params):
    if isinstance(params, placeholder_type()):
      state = inner.init(params)
      state = mark_placeholders(op, state, placeholder_type(), rule)
      return EncodedState(jnp.zeros([], jnp.int32), state)
    chosen = moments.choose_groups(op, params, codec.groups, quantize_mask)
    params = _in_f32(params)
    state = inner.init(params)
    found = find_fields(op, state, params, rule)
    if chosen:
      names = () if fields is None or callable(fields) else fields
      check_names(op, names, state, found)
    return EncodedState(
      jnp.zeros([], jnp.int32),
      _encode(found, params, codec, [x == codec.groups for x in chosen], seed),
    )

  def update_fn(updates, state, params=None, **extra_args):
    check_state(op, state, EncodedState)
    count = optax.safe_increment(state.count)
    old = stored_fields(state.inner)
    check_gradients(op, leaf_paths(updates))
    _check_leaves(op, updates, old)
    groups = old.groups(op, codec)
    new_updates, new_inner = inner.update(
      _in_f32(updates),
      old.replace(old.decode(groups)),
      _in_f32(params),
      **extra_args,
    )
    nodes = old.treedef.flatten_up_to(new_inner)
    values = [
      node for node, was in zip(nodes, old.nodes, strict=True) if is_field(was)
    ]
    new = encode_fields(old.kinds, values, groups, seed, count)
    return (
      _cast_like(new_updates, updates, params),
      EncodedState(count, old.replace(new, nodes)),
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _encode(found, params, codec, encodes, seed) -> Any:
  """The state with its fields encoded."""
  is_encoded = dict(zip(_shapes(params), encodes, strict=True))
  kinds = [kind for kind in found.kinds if kind]
  # The compiler would encode constants itself, for half a minute.
  trees = [
    jax.lax.optimization_barrier(node)
    for node, kind in zip(found.nodes, found.kinds, strict=True)
    if kind
  ]
  flat = [jax.tree.leaves(tree) for tree in trees]
  groups = [
    groups_of(
      [kinds[j] for j, _ in row],
      [flat[j][place] for j, place in row],
      codec if is_encoded[keys] else None,
    )
    for keys, row in rows_of(trees).items()
  ]
  new = iter(encode_fields(kinds, trees, groups, seed, 0))
  return found.treedef.unflatten(
    [
      next(new) if kind else node
      for node, kind in zip(found.nodes, found.kinds, strict=True)
    ]
  )


def _shapes(tree: Any) -> Mapping[Any, tuple[int, ...]]:
  flat = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {keys: jnp.shape(x) for keys, x in flat}


def _check_leaves(op: str, updates: Any, old: StoredFields) -> None:
  """Raises a ValueError where gradients are not of the state's shapes."""
  shapes = _shapes(updates)
  for keys, leaf in old.leaves.items():
    got, want = shapes.get(keys), leaf[0].codes.shape
    if got != want:
      raise ValueError(
        f"{op}: gradients must have the shapes of the parameters given to "
        f"init, got {'no leaf' if got is None else got} for {want} at "
        f"{path_of(keys)!r}; initialize the state with these parameters"
      )


def _in_f32(tree: Any) -> Any:
  """Floating leaves in f32, complex ones in complex64, others as they are."""

  def cast(x):
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.inexact):
      return x
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    dtype = jnp.dtype("complex64" if is_complex else "float32")
    if isinstance(x, jax.ShapeDtypeStruct):
      return x.update(dtype=dtype)
    return x if getattr(x, "dtype", None) == dtype else jnp.asarray(x, dtype)

  return jax.tree.map(cast, tree)


def _cast_like(new: Any, updates: Any, params: Any) -> Any:
  """Updates in the dtypes that optax gives them."""
  trees = (updates,) if params is None else (updates, params)
  return jax.tree.map(
    lambda u, *like: u.astype(jnp.result_type(*like)), new, *trees
  )
