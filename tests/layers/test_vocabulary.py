# SPDX-License-Identifier: Apache-2.0
"""Compares the chunked loss and its gradients with those from all logits."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from coat_jax.layers import vocabulary
from coat_jax.recipes import MeshAxes
from tests.comparing import assert_close
from tests.matrices import quick

B, T, D, V = 4, 16, 32, 96
NAMES = ("data", "fsdp", "tensor")


def arrays(dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = jax.random.normal(keys[0], (B, T, D), dtype)
  weight = jax.random.normal(keys[1], (D, V))
  return hidden, weight, jax.random.randint(keys[2], (B, T), 0, V)


@functools.partial(jax.jit, static_argnames="soft_cap")
def wanted(hidden, weight, targets, shares=1 / (B * T), soft_cap=None):
  """Returns loss and gradients by autodiff, from all logits at once."""

  def loss(hidden, weight):
    logits = hidden @ weight
    if soft_cap is not None:
      logits = soft_cap * jnp.tanh(logits / soft_cap)
    at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    nats = jax.nn.logsumexp(logits, axis=-1) - at_target[..., 0]
    return jnp.sum(shares * nats)

  return jax.value_and_grad(loss, (0, 1))(hidden, weight)


def found(
  hidden, weight, targets, axes=None, shares=None, *, is_tied=False, **options
):
  def loss(hidden, weight):
    return vocabulary.mean_loss(
      hidden, targets, weight, shares, is_tied=is_tied, axes=axes, **options
    )

  turned = (lambda w: w.T) if is_tied else (lambda w: w)
  loss, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(
    hidden, turned(weight)
  )
  return loss, (gradients[0], turned(gradients[1]))


# Tests one chunk, chunks of 5 positions (the last one is padded), and chunks of
# one position.
@pytest.mark.parametrize("positions", [T, 5, 1])
@pytest.mark.parametrize("is_tied", [False, True])
def test_chunked_loss_matches_the_formula(monkeypatch, positions, is_tied):
  monkeypatch.setattr(vocabulary, "LOGITS_BYTES", 4 * V * B * positions)
  args = arrays()
  assert_close(found(*args, is_tied=is_tied), wanted(*args))


@pytest.mark.parametrize(
  "sizes", quick(1, map(pytest.param, [(2, 2, 2), (1, 4, 1)]))
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_loss_on_a_mesh_matches_the_formula(monkeypatch, sizes, is_tied):
  monkeypatch.setattr(vocabulary, "LOGITS_BYTES", 4 * V * 5)
  count = math.prod(sizes)
  mesh = jax.make_mesh(
    sizes,
    NAMES,
    axis_types=(AxisType.Auto,) * 3,
    devices=jax.devices()[:count],
  )
  args = arrays()
  with jax.set_mesh(mesh):
    got = found(*args, MeshAxes(tensor="tensor"), is_tied=is_tied)
    assert_close(got, wanted(*args))
    alone = functools.partial(
      vocabulary.mean_loss, is_tied=is_tied, axes=MeshAxes(tensor="tensor")
    )
    weight = args[1].T if is_tied else args[1]
    loss = jax.jit(alone)(args[0], args[2], weight)
  assert_close(loss, got[0])  # The loss alone, without gradients.


@pytest.mark.parametrize("axes", [None, MeshAxes(tensor="tensor")])
def test_loss_with_shares_and_soft_cap_matches_the_formula(monkeypatch, axes):
  monkeypatch.setattr(vocabulary, "LOGITS_BYTES", 4 * V * 5)
  args = arrays()
  shares = jax.random.uniform(jax.random.key(7), (B, T))
  options = dict(shares=shares.at[0, :3].set(0), soft_cap=1.5)
  mesh = jax.make_mesh((2, 2, 2), NAMES, axis_types=(AxisType.Auto,) * 3)
  with jax.set_mesh(mesh) if axes else contextlib.nullcontext():
    got = found(*args, axes, is_tied=True, **options)
  assert_close(got, wanted(*args, **options))


def test_gradients_scale_with_the_incoming_gradient():
  hidden, weight, targets = arrays()

  def loss(hidden, weight):
    return 3 * vocabulary.mean_loss(
      hidden, targets, weight, is_tied=False, axes=None
    )

  got = jax.jit(jax.grad(loss, (0, 1)))(hidden, weight)
  once = wanted(hidden, weight, targets)[1]
  assert_close(got, jax.tree.map(lambda x: 3 * x, once))


@pytest.mark.parametrize("is_tied", [False, True])
def test_bfloat16_gradients_are_close_to_f32_gradients(is_tied):
  hidden, weight, targets = arrays(jnp.bfloat16)
  loss, (dhidden, dweight) = found(hidden, weight, targets, is_tied=is_tied)
  assert dhidden.dtype == jnp.bfloat16 and dweight.dtype == jnp.float32
  in_f32 = hidden.astype(jnp.float32), weight.astype(jnp.bfloat16)
  want = wanted(in_f32[0], in_f32[1].astype(jnp.float32), targets)
  # Logits are f32. Gradients are rounded to BF16 twice, once before sums whose
  # terms cancel.
  assert_close(loss, want[0], 1e-5)
  assert_close((dhidden, dweight), want[1], 2**-7)


def test_a_mean_over_no_targets_is_refused():
  hidden, weight, targets = arrays()
  with pytest.raises(ValueError, match="needs at least one target"):
    vocabulary.mean_loss(
      hidden[:, :0], targets[:, :0], weight, is_tied=False, axes=None
    )


def test_logits_of_all_positions_are_never_in_memory_at_once(monkeypatch):
  positions, weight = 1024, jnp.zeros((8, 1024))
  monkeypatch.setattr(vocabulary, "LOGITS_BYTES", 4 * 1024 * B * 64)
  hidden = jnp.zeros((B, positions, 8))
  targets = jnp.zeros((B, positions), jnp.int32)

  def loss(hidden, weight):
    return vocabulary.mean_loss(
      hidden, targets, weight, is_tied=False, axes=None
    )

  compiled = jax.jit(jax.value_and_grad(loss, (0, 1)))
  compiled = compiled.lower(hidden, weight).compile()
  all_logits = 4 * 1024 * B * positions
  assert compiled.memory_analysis().temp_size_in_bytes < all_logits / 2


# Tests a mean over 8192 tokens, and a tiny share of a very large batch.
@pytest.mark.parametrize(
  "length, shares", [(2048, None), (T, 2.0**-24)], ids=["mean", "shares"]
)
def test_float16_gradients_do_not_underflow(length, shares):
  vocab_size, loss_scale = 512, 2.0**14
  keys = jax.random.split(jax.random.key(3), 4)
  hidden = (1 + jax.random.normal(keys[0], (B, length, 8))).astype(jnp.float16)
  weight = jax.random.normal(keys[1], (8, vocab_size)) / 8
  # Half of the vocabulary is never a target, so its gradients are small.
  targets = jax.random.randint(keys[2], (B, length), 0, vocab_size // 2)
  if shares is not None:
    shares *= jax.random.uniform(keys[3], targets.shape)

  def loss(hidden, weight):
    return loss_scale * vocabulary.mean_loss(
      hidden, targets, weight, shares, is_tied=False, axes=None
    )

  got = jax.jit(jax.grad(loss, (0, 1)))(hidden, weight.astype(jnp.float16))
  assert {x.dtype for x in got} == {jnp.dtype(jnp.float16)}
  in_f32 = hidden.astype(jnp.float32), weight.astype(jnp.float16)
  each = 1 / targets.size if shares is None else shares
  want = wanted(
    in_f32[0], in_f32[1].astype(jnp.float32), targets, loss_scale * each
  )[1]
  # Gradients are rounded by 2^-11 twice, once before sums whose terms cancel.
  assert_close(got, want, 2**-10)


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_narrow_dtypes_of_targets_may_not_hold_the_vocabulary_size(dtype):
  size = 2 ** (8 * jnp.dtype(dtype).itemsize)
  hidden, _, targets = arrays()
  weight = jax.random.normal(jax.random.key(1), (D, size))
  got = found(hidden, weight, targets.astype(dtype))
  assert_close(got, wanted(hidden, weight, targets))


@pytest.mark.parametrize("target", [-100, -1, V, 2**31 - 1])
@pytest.mark.parametrize("sizes", [None, (2, 2, 2)])
def test_target_outside_the_vocabulary_makes_the_loss_nan(sizes, target):
  hidden, weight, targets = arrays()
  targets = targets.at[1, 3].set(target)
  axes, scope = None, contextlib.nullcontext()
  if sizes:
    axes = MeshAxes(batch=("data", "fsdp"), fsdp="fsdp", tensor="tensor")
    types = (AxisType.Auto,) * len(sizes)
    scope = jax.set_mesh(jax.make_mesh(sizes, NAMES, types))
  with scope:
    loss, gradients = found(hidden, weight, targets, axes)
    assert math.isnan(loss)
    assert all(jnp.isnan(x).any() for x in gradients)
    # Tokens that do not count may have any target.
    shares = jnp.full((B, T), 1 / (B * T)).at[1, 3].set(0.0)
    loss, gradients = found(hidden, weight, targets, axes, shares)
  want = wanted(hidden, weight, targets.at[1, 3].set(0), shares)
  assert_close(loss, want[0], 1e-5)
  for got, exact in zip(gradients, want[1], strict=True):
    assert_close(got, exact, 1e-4)
