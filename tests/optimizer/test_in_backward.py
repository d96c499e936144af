# SPDX-License-Identifier: Apache-2.0
"""Compares steps inside the backward pass with ordinary steps, bit for bit.

An ordinary step differentiates the whole loss and then calls `optimizer.apply`
or optax.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from coat_jax import coat_adamw, coat_lion, codecs, encoded
from coat_jax.optimizer import (
  Clipping,
  fused_coat_adamw,
  fused_coat_lion,
  leafwise,
  step_in_backward,
)
from tests.matrices import quick

LAYERS, WIDTH, WORDS, STEPS = 3, 128, 32, 20


def initial(is_tied):
  keys = jax.random.split(jax.random.key(0), 4)
  normal = jax.random.normal
  params = {
    "embedding": 0.3 * normal(keys[0], (WORDS, WIDTH)),
    "layers": {
      "down": 0.1 * normal(keys[1], (LAYERS, 2 * WIDTH, WIDTH)),
      "scale": jnp.ones((LAYERS, WIDTH)),
      "up": 0.1 * normal(keys[2], (LAYERS, WIDTH, 2 * WIDTH)),
    },
  }
  if not is_tied:
    params["head"] = 0.1 * normal(keys[3], (WIDTH, WORDS))
  return params


def before(tokens, outer):
  return outer["embedding"][tokens]


def layer(params, x):
  x_scaled = x * params["scale"][None, None]
  return x + jnp.tanh(x_scaled @ params["up"]) @ params["down"]


def after(tokens, outer, x):
  head = outer["head"] if "head" in outer else outer["embedding"].T
  log_p = jax.nn.log_softmax(x @ head)
  return -jnp.mean(jnp.take_along_axis(log_p, tokens[..., None], -1))


def batch(step):
  tokens = jax.random.randint(jax.random.key(step), (4, 8), 0, WORDS)
  return tokens, (7 * tokens + 3) % WORDS


def loss_fn(params, tokens, targets):
  x = before(tokens, params)
  x = lax.scan(lambda x, p: (layer(p, x), None), x, params["layers"])[0]
  return after(targets, params, x)


class Halved(Clipping):
  """A clipping rule that halves all gradients."""

  def scale(self, state, own, norm):
    return jnp.float32(0.5), own


def halved(params):
  return dict(clip=Halved(), clip_state=Halved().init(params))


def train_ordinarily(optimizer, params, grad_scale):
  @jax.jit
  def step(params, state, tokens, targets):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens, targets)
    params, state = optimizer.apply(grads, state, params, grad_scale=grad_scale)
    return params, state, (loss, optax.tree.norm(grads))

  return run(step, optimizer, params)


def train_in_backward(optimizer, params, layer=layer, **clipping):
  @jax.jit
  def step(params, state, tokens, targets):
    done = step_in_backward(
      optimizer,
      params,
      state,
      before=functools.partial(before, tokens),
      layer=layer,
      after=functools.partial(after, targets),
      **clipping,
    )
    assert not clipping or done.clip_state
    return done.params, done.state, (done.loss, done.grad_norm)

  return run(step, optimizer, params)


def run(step, optimizer, params):
  state, found = optimizer.init(params), []
  for i in range(STEPS):
    params, state, values = step(params, state, *batch(i))
    found.append(values)
  return params, state, np.array(found)


def assert_same_bits(a, b):
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  assert all(x.tobytes() == y.tobytes() for x, y in jax.device_get(list(pairs)))


@pytest.mark.parametrize(
  ("make", "codec", "is_tied"),
  quick(
    1,
    [
      (fused_coat_adamw, codecs.coat(), True),
      (fused_coat_lion, codecs.coat(), True),
      (fused_coat_adamw, codecs.coat(rounding="nearest"), False),
      (fused_coat_adamw, codecs.log8(), False),
    ],
  ),
)
def test_steps_match_ordinary_steps_bit_for_bit(make, codec, is_tied):
  optimizer = make(3e-3, codec=codec, weight_decay=0.1)
  params = initial(is_tied)
  *expected, values = train_ordinarily(optimizer, params, 0.5)
  *got, found = train_in_backward(optimizer, params, **halved(params))
  assert_same_bits(got, expected)
  np.testing.assert_allclose(found, values, rtol=1e-6)
  assert values[0, 0] - values[-1, 0] > 0.1  # The loss falls.


def test_checkpointing_layers_does_not_change_the_result():
  optimizer = fused_coat_adamw(3e-3, codec=codecs.float32())
  params = initial(False)
  checkpointed = jax.checkpoint(layer, prevent_cse=False)
  *expected, values = train_in_backward(optimizer, params)
  *got, found = train_in_backward(optimizer, params, layer=checkpointed)
  np.testing.assert_allclose(found, values, rtol=1e-4)
  close = functools.partial(np.testing.assert_allclose, atol=1e-4)
  jax.tree.map(close, got[0], expected[0])


def test_scan_saves_only_the_inputs_of_checkpointed_layers():
  optimizer = leafwise(optax.sgd(1e-3))
  params = initial(False)
  tokens, targets = batch(0)

  def step(params, state):
    return step_in_backward(
      optimizer,
      params,
      state,
      before=functools.partial(before, tokens),
      layer=jax.checkpoint(layer),
      after=functools.partial(after, targets),
    )

  jaxpr = jax.make_jaxpr(step)(params, optimizer.init(params)).jaxpr
  forward, backward = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
  assert not forward.params["reverse"] and backward.params["reverse"]
  x, *saved = [v.aval.shape for v in forward.outvars]
  assert x == (4, 8, WIDTH)
  # A checkpointed layer saves its input once, and no parameters.
  assert saved == [(LAYERS, 4, 8, WIDTH)]


def test_each_layer_receives_its_slice_of_per_layer():
  optimizer = leafwise(optax.sgd(1e-3))
  params = initial(False)
  gains = jnp.array([0.5, 1.0, 2.0])
  tokens, targets = batch(0)

  def gained(params, x, gain):
    return x + gain * (layer(params, x) - x)

  def whole(params):
    x = before(tokens, params)
    for i in range(LAYERS):
      each = jax.tree.map(lambda p, i=i: p[i], params["layers"])
      x = gained(each, x, gains[i])
    return after(targets, params, x)

  done = step_in_backward(
    optimizer,
    params,
    optimizer.init(params),
    before=functools.partial(before, tokens),
    layer=gained,
    after=functools.partial(after, targets),
    per_layer=gains,
  )
  loss, grads = jax.value_and_grad(whole)(params)
  np.testing.assert_allclose(done.loss, loss, rtol=1e-5)
  np.testing.assert_allclose(done.grad_norm, optax.tree.norm(grads), rtol=1e-5)


@pytest.mark.slow
def test_layers_may_pass_a_tree():
  """Layers pass the residual stream, and a sum over layers for the loss."""
  optimizer = fused_coat_adamw(3e-3, weight_decay=0.1)
  params = initial(False)
  tokens, targets = batch(0)

  def summing(params, carry):
    x, total, none = carry
    y = layer(params, x)
    return y, total + jnp.mean(y**2, axis=(0, 1)), none

  def start(outer):
    return before(tokens, outer), jnp.zeros(WIDTH), None

  def loss_of_both(outer, carry):
    x, total, none = carry
    assert none is None
    return after(targets, outer, x) + 0.1 * jnp.sum(total**2)

  def loss(params):
    def scanned(carry, p):
      return summing(p, carry), None

    carry = lax.scan(scanned, start(params), params["layers"])[0]
    return loss_of_both(params, carry)

  @jax.jit
  def ordinarily(params, state):
    value, grads = jax.value_and_grad(loss)(params)
    return *optimizer.apply(grads, state, params, grad_scale=0.5), value

  @jax.jit
  def in_backward(params, state):
    done = step_in_backward(
      optimizer,
      params,
      state,
      before=start,
      layer=summing,
      after=loss_of_both,
      **halved(params),
    )
    return done.params, done.state, done.loss

  state = optimizer.init(params)
  *expected, want = ordinarily(params, state)
  *got, found = in_backward(params, state)
  assert_same_bits(got, expected)
  np.testing.assert_allclose(found, want, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
def test_optax_transformation_updates_leaf_by_leaf(is_tied):
  def decayed(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)

  tx = optax.adamw(
    optax.linear_schedule(1e-2, 1e-3, STEPS), weight_decay=0.1, mask=decayed
  )
  params = initial(is_tied)
  *got, _ = train_in_backward(leafwise(tx), params)
  expected, state = params, tx.init(params)
  for i in range(STEPS):
    grads = jax.grad(loss_fn)(expected, *batch(i))
    updates, state = tx.update(grads, state, expected)
    expected = optax.apply_updates(expected, updates)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
  jax.tree.map(close, got, [expected, state])


@pytest.mark.parametrize(
  ("optimizer", "error", "said"),
  [
    (coat_adamw(1e-2), ValueError, "as in coat_adamw, .*pass fused_coat_adamw"),
    (
      coat_lion(1e-2),
      ValueError,
      "in .*coat_lion, .*fused_coat_lion .without",
    ),
    (
      encoded(optax.lion(1e-2), codecs.coat()),
      ValueError,
      "and encoded.; .*leafwise of an optimizer",
    ),
    (optax.sgd(1e-2), TypeError, "without begin; pass .*leafwise"),
  ],
)
def test_plain_optax_transformations_are_refused(optimizer, error, said):
  params = initial(False)
  with pytest.raises(error, match=f"step_in_backward: .*{said}"):
    inspect.unwrap(step_in_backward)(  # Call without beartype.
      optimizer,
      params,
      optimizer.init(params),
      before=functools.partial(before, batch(0)[0]),
      layer=layer,
      after=functools.partial(after, batch(0)[1]),
    )


def test_nonfinite_gradients_are_reported_by_leaf():
  optimizer = leafwise(optax.sgd(1e-3))
  params = initial(False)
  tokens, targets = batch(0)

  @jax.custom_vjp
  def spoil(x):
    return x

  spoil.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.nan,))

  def spoiled(params, x):
    return layer(params | {"scale": spoil(params["scale"])}, x)

  done = step_in_backward(
    optimizer,
    params,
    optimizer.init(params),
    before=functools.partial(before, tokens),
    layer=spoiled,
    after=functools.partial(after, targets),
  )
  paths = [path for path, _ in jax.tree.leaves_with_path(params)]
  bad = [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, is_finite in zip(paths, done.is_finite, strict=True)
    if not is_finite
  ]
  assert bad == ["layers/scale"]
  assert jnp.isfinite(done.loss) and not jnp.isfinite(done.grad_norm)


@pytest.mark.parametrize(
  ("stack", "said"), [("blocks", "no parameters below 'blocks'"), ("", "")]
)
def test_missing_stack_is_refused(stack, said):
  optimizer = fused_coat_adamw(1e-3)
  params = initial(False)
  with pytest.raises(ValueError, match=f"step_in_backward: .*{said}"):
    step_in_backward(
      optimizer,
      params,
      optimizer.init(params),
      before=functools.partial(before, batch(0)[0]),
      layer=layer,
      after=functools.partial(after, batch(0)[1]),
      stack=stack,
    )


@pytest.mark.parametrize(
  ("wrong", "said"),
  [
    (dict(layer=lambda p, x: layer(p, x).astype("bfloat16")), "a layer must"),
    (dict(after=lambda outer, x: x[0]), "after must return a scalar"),
    (dict(clip=Clipping()), "clip and clip_state must be passed"),
  ],
)
def test_inconsistent_arguments_are_refused(wrong, said):
  optimizer = fused_coat_adamw(1e-3)
  params = initial(False)
  functions = dict(
    before=functools.partial(before, batch(0)[0]),
    layer=layer,
    after=functools.partial(after, batch(0)[1]),
  )
  with pytest.raises(ValueError, match=f"step_in_backward: {said}"):
    step_in_backward(
      optimizer, params, optimizer.init(params), **functions | wrong
    )
