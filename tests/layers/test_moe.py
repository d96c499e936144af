# SPDX-License-Identifier: Apache-2.0
"""Compares MoE layers with an oracle that runs all experts on all tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import ops, recipes
from coat_jax.layers import (
  MoE,
  MoEWeights,
  RoutingStats,
  load_balancing_loss,
  moe,
)
from coat_jax.numerics.formats import E5M2
from coat_jax.numerics.qtensor import num_groups
from tests.comparing import assert_close, assert_same_bits, jit
from tests.layers import straight_through
from tests.layers.test_residuals import BF16, F32, FP8, kinds
from tests.matrices import quick

D, F, E, K, G = 24, 40, 6, 2, 16
COAT = recipes.coat()
FP8_EXPERTS = recipes.coat(experts="fp8")


def case(rows=(2, 7), has_beta=False, seed=0):
  rng = np.random.default_rng(seed)

  def normal(*shape, scale=1.0):
    return jnp.float32(scale * rng.normal(size=shape))

  weights = MoEWeights(
    gamma=normal(D),
    beta=normal(D) if has_beta else None,
    router=normal(D, E, scale=D**-0.5),
    gate_up=normal(E, D, 2, F, scale=D**-0.5),
    down=normal(E, F, D, scale=F**-0.5),
  )
  return normal(*rows, D), weights, normal(*rows, D)


@functools.partial(
  jit, static_argnames=("kind", "normalize", "add_input", "recipe")
)
def layer(x, weights, dy, dprobability, kind, normalize, add_input, recipe):
  def f(x, weights):
    return moe(
      x,
      weights,
      experts_per_token=K,
      normalize=normalize,
      kind=kind,
      eps=1e-5,
      add_input=add_input,
      recipe=recipe,
    )

  (y, stats), vjp = jax.vjp(f, x, weights)
  # The incoming gradient of the load must have no effect.
  return (y, stats), vjp((dy, RoutingStats(-dprobability, dprobability)))


def dense(x, w, kind, normalize, add_input, recipe):
  """Runs every expert on every token in f32; unchosen experts get weight 0."""
  y = x
  if recipe.nonlinear == "fp8":
    y = straight_through.per_group(x)
    if kind is not None:
      y = straight_through.norm(x, w.gamma, w.beta, kind, 1e-5)
  elif kind is not None:
    y = _norm(x, w.gamma, w.beta, kind)
  probabilities = jax.nn.softmax(y @ w.router, axis=-1)
  kept = jnp.sort(probabilities, axis=-1)[..., -K:]
  p = jnp.where(probabilities >= kept[..., :1], probabilities, 0.0)
  if normalize:
    p = p / jnp.sum(p, axis=-1, keepdims=True)
  as_is = lambda x: x  # noqa: E731
  keep = straight_through.per_group if recipe.nonlinear == "fp8" else as_is
  # Experts that were not chosen have zeros in z and in the gradient of h. The
  # zeros change no scale.
  operand, of_experts, gradient = as_is, as_is, as_is
  if recipe.experts == "fp8":
    operand = lambda x: straight_through.pin(  # noqa: E731
      x, straight_through.per_tensor(x)
    )
    of_experts = jax.vmap(operand)
    gradient = lambda x: straight_through.rounded_gradient(x, E5M2)  # noqa: E731
  gate_up, down = of_experts(w.gate_up), of_experts(w.down)
  h = jnp.einsum("...d,edif->...eif", operand(y), gate_up)
  h = h.reshape(*h.shape[:-2], -1)

  def activated(h, p):
    gate, up = map(keep, jnp.split(h, 2, axis=-1))
    return p * jax.nn.silu(gate) * up

  if recipe.experts == "fp8":
    h, zero = straight_through.gradient_rounded_later(h)
    z = straight_through.activation(
      activated, 2, ops.Groups(16), h, zero, p[..., None]
    )
  else:
    z = activated(h, p[..., None])
  z = operand(z)
  out = gradient(jnp.einsum("...ef,efd->...d", z, down))
  return (x + out if add_input else out), probabilities.reshape(-1, E).mean(0)


def _norm(x, gamma, beta, kind):
  x = x - x.mean(-1, keepdims=True) if kind == "layer" else x
  y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * row(gamma)
  return y if beta is None else y + row(beta)


def row(v):
  return v.reshape(1, 1, -1)


@functools.partial(
  jit, static_argnames=("kind", "normalize", "add_input", "recipe")
)
def oracle(x, weights, dy, dprobability, kind, normalize, add_input, recipe):
  f = functools.partial(
    dense,
    kind=kind,
    normalize=normalize,
    add_input=add_input,
    recipe=recipe,
  )
  out, vjp = jax.vjp(f, x, weights)
  return out, vjp((dy, dprobability))


@pytest.mark.parametrize(
  "kind, normalize, add_input, recipe",
  quick(
    4,
    [
      ("rms", False, True, FP8_EXPERTS),
      ("rms", False, True, COAT),
      ("layer", True, False, COAT),
      ("rms", True, True, recipes.bf16()),
      ("layer", True, False, FP8_EXPERTS),
      (None, True, True, FP8_EXPERTS),
      (None, True, True, COAT),
      (None, False, False, recipes.fp8_linear()),
    ],
  ),
)
def test_moe_matches_running_all_experts_on_all_tokens(
  kind, normalize, add_input, recipe
):
  x, weights, dy = case(has_beta=kind == "layer")
  if kind is None:
    weights = weights._replace(gamma=None)
  dprobability = jnp.float32(np.random.default_rng(1).normal(size=E))
  args = x, weights, dy, dprobability, kind, normalize, add_input
  (y, stats), gradients = layer(*args, recipe)
  want, want_gradients = oracle(*args, recipe)
  assert_close((y, stats.probability), want)
  assert_close(gradients, want_gradients)


def routed(x, router, normalize):
  """Returns each token's experts and weights, the load and the probability."""
  experts, weights = [], []
  load, total = np.zeros(E), np.zeros(E)
  for token in np.asarray(x, np.float64).reshape(-1, D):
    logits = token @ np.asarray(router, np.float64)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    chosen = np.argsort(-p, kind="stable")[:K]
    w = p[chosen] / p[chosen].sum() if normalize else p[chosen]
    experts.append(chosen)
    weights.append(w)
    load[chosen] += 1
    total += p
  count = len(experts)
  return experts, weights, load / count, total / count


@pytest.mark.parametrize("normalize", quick(1, [False, True]))
def test_routing_matches_numpy(normalize):
  # Make the output show which expert computed it: gate and up read a constant
  # feature, and down writes to a different column for each expert.
  x, weights, _ = case((2, 9))
  x = x.at[..., 0].set(1.0)
  gate_up = jnp.zeros((E, D, 2, F)).at[:, 0, :, 0].set(1.0)
  down = jnp.zeros((E, F, D)).at[jnp.arange(E), 0, jnp.arange(E)].set(1.0)
  weights = MoEWeights(None, None, weights.router, gate_up, down)
  recipe = recipes.bf16()
  y, stats = layer(x, weights, x, jnp.zeros(E), None, normalize, False, recipe)[
    0
  ]
  experts, p, load, probability = routed(x, weights.router, normalize)
  want = np.zeros((18, D))
  for i in range(18):
    want[i, experts[i]] = p[i] / (1 + np.exp(-1.0))
  assert_close(y.reshape(18, D), want)
  assert_close(stats, RoutingStats(load, probability))
  assert float(stats.load.sum()) == K


def test_load_balancing_loss_covers_tokens_of_all_layers():
  # As in transformers: concatenate the tokens of all layers, average over them
  # for each of the K choices and each expert, and sum over choices.
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(3, 10, E))  # [layers, tokens, experts]
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  places = np.argsort(-p, axis=-1)[..., :K]
  chosen = np.eye(E)[places]  # [3, 10, K, E]
  f, mean = chosen.reshape(30, K, E).mean(0), p.reshape(30, E).mean(0)
  want = E * np.sum(f * mean)
  stats = RoutingStats(
    jnp.float32(chosen.sum(2).mean(1)), jnp.float32(p.mean(1))
  )
  assert_close(load_balancing_loss(stats), want)
  gradient = jax.grad(load_balancing_loss)(stats)
  assert not np.any(gradient.load)
  assert_close(gradient.probability[1], E * f.sum(0) / 3)
  # If all experts have equal load and probability, the loss is K.
  even = RoutingStats(jnp.full(E, K / E), jnp.full(E, 1 / E))
  assert_close(load_balancing_loss(even), np.float32(K))


def test_moe_drops_no_token():
  # The router sends all tokens to experts 1 and 4.
  x, weights, dy = case((3, 5))
  x = jnp.abs(x)
  router = jnp.zeros((D, E)).at[:, 4].set(1.0).at[:, 1].set(0.5)
  weights = weights._replace(router=router, gamma=None)
  args = x, weights, dy, jnp.zeros(E), None, True, True
  (y, stats), gradients = layer(*args, COAT)
  assert_same_bits(stats.load, jnp.float32([0, 1, 0, 0, 1, 0]))
  want, want_gradients = oracle(*args, COAT)
  assert_close(y, want[0])
  assert_close(gradients, want_gradients)
  assert not np.any(gradients[1].gate_up[0])


@pytest.mark.parametrize("recipe", [COAT, FP8_EXPERTS, recipes.bf16()])
def test_statistics_and_gradients_without_tokens_are_zero(recipe):
  x, weights, dy = case((2, 0))
  args = x, weights, dy, jnp.ones(E), "rms", True, True
  (y, stats), (dx, dw) = layer(*args, recipe)
  assert y.shape == dx.shape == x.shape
  zero = jnp.zeros(E)
  assert_same_bits(stats, RoutingStats(load=zero, probability=zero))
  assert_same_bits(dw, jax.tree.map(jnp.zeros_like, weights))


@pytest.mark.slow
def test_moe_in_bfloat16_is_close_to_f32():
  x, weights, dy = case((2, 32))
  # The router is so decisive that rounding to BF16 changes no choice.
  weights = weights._replace(router=8 * weights.router)
  args = weights, dy, jnp.zeros(E), "rms", True, True
  want, want_gradients = oracle(x, *args, COAT)
  x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
  (y, _), (dx, dw) = layer(x, weights, dy, *args[2:], COAT)
  assert y.dtype == dx.dtype == jnp.bfloat16
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(dw))
  found = jax.tree.leaves((y, dx, dw))
  for got, exact in zip(
    found, jax.tree.leaves((want[0], want_gradients)), strict=True
  ):
    error = jnp.linalg.norm(got.astype(jnp.float32) - exact)
    assert error < 0.03 * jnp.linalg.norm(exact)


def test_moe_norm_multiplies_by_one_plus_scale():
  scale = jnp.linspace(-0.5, 0.5, D)
  build = functools.partial(MoE, D, F, E, K, dtype=jnp.float32)
  gemma = build(scale_plus_one=True, rngs=nnx.Rngs(0))
  plain = build(rngs=nnx.Rngs(0))
  gemma.norm.scale[...], plain.norm.scale[...] = scale, 1 + scale
  run = jit(lambda m, x: m(x))
  assert_same_bits(run(gemma, case()[0]), run(plain, case()[0]))


@pytest.mark.parametrize("recipe", [COAT, FP8_EXPERTS])
def test_moe_saves_codes_and_expert_numbers(recipe):
  t, f = 34, 200
  m = MoE(D, f, E, K, recipe=recipe, rngs=nnx.Rngs(0))
  graph, params = nnx.split(m)
  x = jax.ShapeDtypeStruct((1, t, D), jnp.bfloat16)

  def saved(params, x):
    leaves = jax.tree.leaves(
      jax.vjp(lambda p, x: nnx.merge(graph, p)(x), params, x)[1]
    )
    known = {p.shape for p in jax.tree.leaves(params)}
    return [leaf for leaf in leaves if leaf.shape not in known]

  leaves = jax.eval_shape(saved, params, x)
  scales = (1, t, K, num_groups(f, G))
  # FP8 experts also save scales, because the backward pass quantizes tokens and
  # weights again.
  again = {(F32, ()): 2, (F32, (E,)): 2} if recipe is FP8_EXPERTS else {}
  assert kinds(leaves) == again | {
    (FP8, (1, t, D)): 1,
    (BF16, (1, t, num_groups(D, G))): 1,
    (FP8, (1, t, K, f)): 2,
    (BF16, scales): 2,
    (jnp.dtype(jnp.int32), (1, t, K)): 1,
  }
  assert not any(leaf.dtype == F32 and leaf.size > E for leaf in leaves)


@pytest.mark.slow
def test_moe_layers_can_be_scanned():
  @nnx.split_rngs(splits=2)
  @nnx.vmap
  def stack(rngs):
    return MoE(D, F, E, K, dtype=jnp.float32, recipe=COAT, rngs=rngs)

  layers = stack(nnx.Rngs(0))
  x = case()[0]

  def loss(params, x):
    model = nnx.merge(graph, params)
    y, stats = nnx.scan(lambda x, m: m(x), out_axes=(nnx.Carry, 0))(x, model)
    return jnp.mean(y**2) + 0.1 * load_balancing_loss(stats), stats

  def unrolled(params, x):
    all_stats = []
    for i in range(2):
      part = jax.tree.map(lambda p, i=i: p[i], params)
      x, stats = nnx.merge(graph, part)(x)
      all_stats.append(stats)
    stats = jax.tree.map(lambda *a: jnp.stack(a), *all_stats)
    return jnp.mean(x**2) + 0.1 * load_balancing_loss(stats), stats

  graph, params = nnx.split(layers)
  found, wanted = (
    jit(jax.value_and_grad(f, has_aux=True))(params, x)
    for f in (loss, unrolled)
  )
  assert found[0][1].load.shape == (2, E)
  assert_close(found, wanted)
  assert all(np.any(g) for g in jax.tree.leaves(found[1]))


def test_experts_are_initialized_by_their_fan_in():
  m = MoE(64, 96, 8, 2, recipe=COAT, rngs=nnx.Rngs(0))
  for kernel, fan_in in ((m.router, 64), (m.gate_up, 64), (m.down, 96)):
    assert np.std(kernel[...]) == pytest.approx(fan_in**-0.5, rel=0.1)
  assert not np.array_equal(m.gate_up[0], m.gate_up[1])


def test_moe_refuses_misshapen_weights_and_bad_numbers_of_experts():
  x, weights, _ = case()
  call = functools.partial(
    moe, normalize=False, kind="rms", eps=1e-5, recipe=COAT
  )
  for bad in (
    weights._replace(down=weights.down[:-1]),
    weights._replace(gate_up=weights.gate_up[:, :, 0]),
    weights._replace(gate_up=weights.gate_up[..., 1:]),
    weights._replace(router=weights.router[1:]),
    weights._replace(router=weights.router[0]),
  ):
    with pytest.raises(ValueError, match=r"moe: weights must be router \[D, E"):
      call(x, bad, experts_per_token=K)
  for k in (0, E + 1):
    with pytest.raises(ValueError, match=f"(from 1 to|at most) 6, got {k}"):
      call(x, weights, experts_per_token=k)
