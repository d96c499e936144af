# SPDX-License-Identifier: Apache-2.0
"""Tests a decoder layer of each recipe under grad, vmap, remat and scan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.layers import MLP, RESIDUAL_NAMES, Attention, Linear, MoE
from coat_jax.numerics.formats import E4M3
from coat_jax.ops import attention
from tests.comparing import assert_close, assert_same_bits, jit
from tests.matrices import quick

B, T, D, F = 2, 6, 24, 40
RECIPES = {
  "bf16": recipes.bf16(),
  "fp8_linear": recipes.fp8_linear(),
  "coat": recipes.coat(residuals="coat"),
  "coat_fp8": recipes.coat(residuals="coat", attention="fp8"),
  "minimal": recipes.coat(),
  "minimal_fp8": recipes.coat(attention="fp8"),
  "groups_of_5": recipes.coat(group_size=5),
}
COATS = [name for name, r in RECIPES.items() if r.name == "coat"]
ONLY_NAMES = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
SOME_NAMES = jax.checkpoint_policies.save_only_these_names(
  "coat_norm", "coat_activation", "coat_linear"
)


class Layer(nnx.Module):
  def __init__(self, recipe, *, rngs, **options):
    shared = dict(recipe=recipe, rngs=rngs, use_bias=True, **options)
    self.attention = Attention(D, 4, num_kv_heads=2, head_dim=8, **shared)
    self.mlp = MLP(D, F, **shared)

  def __call__(self, x):
    return self.mlp(self.attention(x))


def mlp(recipe, *, rngs):
  """Builds only the MLP of a layer, in f32, for faster tests."""
  return MLP(D, F, recipe=recipe, dtype=jnp.float32, rngs=rngs)


def make(name, layer=Layer, **options):
  """Returns f(parameters, x), which runs a layer, and the parameters."""
  graph, params = nnx.split(layer(RECIPES[name], rngs=nnx.Rngs(0), **options))
  return (lambda params, x: nnx.merge(graph, params)(x)), params


def inputs(*shape, dtype=jnp.bfloat16):
  return jax.random.normal(jax.random.key(1), (*shape, D), dtype)


def mean_square(f):
  return lambda params, x: jnp.mean(jnp.square(f(params, x).astype("f4")))


def norm(tree):
  leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
  return np.linalg.norm(np.concatenate(leaves))


@functools.cache
def results(name):
  """Returns a layer's loss and gradients at inputs(B, T)."""
  f, params = make(name)
  return jit(jax.value_and_grad(mean_square(f)))(params, inputs(B, T))


def dtypes(tree):
  return jax.tree.map(lambda x: x.dtype, tree)


@pytest.mark.parametrize("name", quick(3, RECIPES))
def test_gradients_match_bf16_except_for_fp8_errors(name):
  loss, gradients = results(name)
  assert dtypes(gradients) == dtypes(make(name)[1])
  want_loss, want = results("bf16")
  # Each quantization has an RMS error of 2.6 % (E5M2: 5.3 %), and about ten
  # follow one another.
  assert abs(loss - want_loss) < 0.05 * want_loss
  difference = jax.tree.map(lambda a, b: a - b, gradients, want)
  assert norm(difference) < 0.15 * norm(want)
  if name != "bf16":
    assert norm(difference) > 1e-3 * norm(want)  # FP8 was used.


def test_nnx_gradients_match_jax_gradients():
  model = Layer(RECIPES["minimal"], rngs=nnx.Rngs(0))

  @nnx.jit
  def gradients_of(model, x):
    return nnx.grad(lambda m: jnp.mean(m(x).astype("f4") ** 2))(model)

  gradients = jax.tree.leaves(gradients_of(model, inputs(B, T)))
  want = jax.tree.leaves(results("minimal")[1])
  # XLA compiles this program differently from that of `results`, so some values
  # are rounded differently to BF16 and FP8.
  off = [a - b for a, b in zip(gradients, want, strict=True)]
  assert norm(off) < 0.01 * norm(want)


def products(f, *args):
  """Counts matmuls in the gradient of f."""
  jaxpr = jax.make_jaxpr(jax.grad(mean_square(f)))(*args)
  return str(jaxpr).count("dot_general")


@pytest.mark.parametrize("name", quick(1, COATS))
def test_checkpoint_with_names_computes_no_matmul_twice(name):
  f, params = make(name)
  x = inputs(B, T)
  named = jax.checkpoint(f, policy=ONLY_NAMES)
  assert products(named, params, x) == products(f, params, x)
  assert products(jax.checkpoint(f), params, x) > products(f, params, x)
  # The checkpoint saves the same arrays as f alone, but codes as bytes.
  kept = jax.eval_shape(lambda *a: jax.vjp(named, *a)[1], params, x)
  own = jax.eval_shape(lambda *a: jax.vjp(f, *a)[1], params, x)
  shapes = [
    {(leaf.shape, leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree)}
    for tree in (kept, own)
  ]
  assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", quick(1, COATS))
def test_checkpoint_that_recomputes_attention_saves_no_wide_array(name):
  f, params = make(name)
  fewer = [
    n for n in RESIDUAL_NAMES if n not in ("coat_attention", "coat_rope")
  ]
  policy = jax.checkpoint_policies.save_only_these_names(*fewer)
  checkpointed = jax.checkpoint(f, policy=policy)
  kept = jax.eval_shape(
    lambda *args: jax.vjp(checkpointed, *args)[1], params, inputs(B, T)
  )
  # Recomputation starts from codes, so the BF16 input is not saved.
  weights = {leaf.shape for leaf in jax.tree.leaves(params)}
  wide = {
    leaf.shape
    for leaf in jax.tree.leaves(kept)
    if leaf.dtype.itemsize > 1 and leaf.size >= B * T * 16
  }
  assert wide <= weights


POLICIES = {
  "names": ONLY_NAMES,
  "some": SOME_NAMES,
  "none": None,
  "all": jax.checkpoint_policies.everything_saveable,
}


@pytest.mark.parametrize("policy", quick(1, POLICIES))
def test_checkpoint_changes_no_gradient(policy):
  # If a policy saved E4M3 arrays, JAX would turn values from 256 up into NaN.
  f, params = make("coat")
  f = mean_square(jax.checkpoint(f, policy=POLICIES[policy]))
  got = jit(jax.value_and_grad(f))(params, inputs(B, T))
  assert_same_bits(got, results("coat"))


def stack(name, depth=2, layer=Layer):
  """Returns stacked parameters, and functions that scan or loop over layers."""

  @nnx.split_rngs(splits=depth)
  @nnx.vmap
  def layers(rngs):
    return layer(RECIPES[name], rngs=rngs)

  graph, params = nnx.split(layers(nnx.Rngs(0)))

  def scanned(params, x):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
      return layer(x)

    return forward(x, nnx.merge(graph, params))

  def looped(params, x):
    for i in range(depth):
      one = jax.tree.map(lambda p, i=i: p[i], params)
      x = nnx.merge(graph, one)(x)
    return x

  return params, scanned, looped


def test_scanned_layers_match_a_loop():
  params, scanned, looped = stack("minimal", layer=mlp)
  x = inputs(B, T, dtype=jnp.float32)
  results = [
    jit(jax.value_and_grad(mean_square(f)))(params, x)
    for f in (scanned, looped)
  ]
  assert_close(*results)


@pytest.mark.parametrize("name", quick(1, COATS))
def test_scanned_layers_save_fp8(name):
  depth, length = 3, 48  # No weight has B * length columns.
  params, scanned, _ = stack(name, depth)

  def residuals(params, x):
    return jax.tree.leaves(jax.vjp(scanned, params, x)[1])

  jaxpr = jax.make_jaxpr(residuals)(params, inputs(B, length)).jaxpr
  kept = {v for v in jaxpr.outvars if v not in jaxpr.invars}
  stacked = [v.aval for v in kept if v.aval.shape[:1] == (depth,)]
  codes = [a for a in stacked if a.dtype == E4M3]
  # Leave out statistics and scales, which are far smaller than codes.
  large = {
    (a.shape[3:], str(a.dtype))
    for a in stacked
    if a.size >= depth * B * length * 16 and a.dtype != E4M3
  }
  of_output, of_keys = ((4, 8), "bfloat16"), ((2, 8), "bfloat16")
  is_fp8 = RECIPES[name].attention == "fp8"
  assert large == ({of_output} if is_fp8 else {of_output, of_keys})
  assert len(codes) >= 4
  # Weights stay allocated anyway, so they must not be saved again.
  weights = {p.shape for p in jax.tree.leaves(params)}
  assert not weights & {a.shape for a in stacked if a.ndim > 1}


def test_scan_saves_no_causal_mask(monkeypatch):
  monkeypatch.setattr(attention, "_CHUNK", 8)
  length = 32
  params, scanned, _ = stack("minimal")
  jaxpr = jax.make_jaxpr(lambda *args: jax.vjp(scanned, *args)[1])(
    params, inputs(B, length)
  ).jaxpr
  scans = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
  assert scans
  for equation in scans:
    arrays = [v.aval for v in (*equation.invars, *equation.outvars)]
    assert not [a for a in arrays if a.shape.count(length) > 1]
    assert not [a for a in arrays if a.dtype == bool]


def test_vmap_over_models_matches_each_model_alone():
  params, _, _ = stack("minimal", layer=mlp)
  f, _ = make("minimal", layer=mlp)
  x = inputs(2, B, T, dtype=jnp.float32)
  gradient = jax.value_and_grad(mean_square(f))
  got = jit(jax.vmap(gradient))(params, x)
  alone = jit(gradient)
  for i in range(2):
    one, mine = jax.tree.map(lambda leaf, i=i: leaf[i], (params, got))
    assert_close(mine, alone(one, x[i]))


def test_layer_accepts_any_leading_axes():
  f, params = make("minimal", dtype=jnp.float32)
  x = inputs(B, T, dtype=jnp.float32)
  y = jit(f)(params, x)
  assert_close(jit(f)(params, x[None])[0], y, 1e-6)
  assert jax.eval_shape(f, params, x[0]).shape == (T, D)


@pytest.mark.parametrize("name", quick(2, RECIPES))
def test_bfloat16_parameters_get_bfloat16_gradients(name):
  f, params = make(name, param_dtype=jnp.bfloat16)
  gradients = jax.eval_shape(jax.grad(mean_square(f)), params, inputs(B, T))
  assert {x.dtype for x in jax.tree.leaves(gradients)} == {
    jnp.dtype(jnp.bfloat16)
  }


def penalty(module):
  """Returns a function whose gradient is a second derivative of the module."""
  gradient = jax.grad(lambda x: jnp.sum(jnp.sin(module(x))))
  return lambda x: jnp.sum(gradient(x) ** 2)


def product(module):
  """Returns a function that multiplies the module's Hessian by a vector."""
  gradient = jax.grad(lambda x: jnp.sum(jnp.sin(module(x))))
  return lambda x: jax.jvp(gradient, (x,), (x,))[1]


@pytest.mark.parametrize("second", [lambda m: jax.grad(penalty(m)), product])
@pytest.mark.parametrize(
  "recipe",
  [recipes.coat(), recipes.fp8_linear(), recipes.fp8_block(), recipes.int8()],
  ids=lambda recipe: recipe.name,
)
def test_second_derivatives_through_codes_are_refused(recipe, second):
  linear = Linear(128, 128, recipe=recipe, rngs=nnx.Rngs(0))
  x = jnp.ones((128, 128))
  with pytest.raises(NotImplementedError, match="differentiated only once"):
    second(linear)(x)
  # The remedy: stop the arguments of the first derivative.
  gradient = jax.grad(lambda x: jnp.sum(jnp.sin(linear(x))))
  stopped = lambda x: jnp.sum(x * gradient(jax.lax.stop_gradient(x)))  # noqa: E731
  assert_same_bits(jax.grad(stopped)(x), gradient(x))


def test_second_derivatives_with_recipe_bf16_match_plain_jnp():
  options = dict(dtype=jnp.float32, recipe=recipes.bf16(), rngs=nnx.Rngs(0))
  linear = Linear(D, F, **options)
  x = inputs(B, dtype=jnp.float32)
  plain = lambda x: x @ linear.kernel[...]  # noqa: E731
  for second in (lambda m: jax.grad(penalty(m)), product):
    assert_close(second(linear)(x), second(plain)(x), 1e-5)


def test_mixture_in_bf16_has_second_derivatives():
  options = dict(dtype=jnp.float32, recipe=recipes.bf16(), rngs=nnx.Rngs(0))
  mixture = MoE(D, F, num_experts=4, experts_per_token=2, **options)
  x = inputs(B, dtype=jnp.float32)[:, None]
  gradient = jax.grad(lambda x: jnp.sum(jnp.sin(mixture(x)[0])))
  direction = jnp.ones_like(x)
  _, found = jit(functools.partial(jax.jvp, gradient))((x,), (direction,))
  step, first = 1e-2, jit(gradient)
  ahead, behind = (first(x + sign * step * direction) for sign in (1, -1))
  assert_close(found, (ahead - behind) / (2 * step), 1e-2)
