# SPDX-License-Identifier: Apache-2.0
"""Tests blocks on meshes of eight devices.

Results must match those of one device, and devices must exchange FP8 codes.
"""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P
from jax.ad_checkpoint import checkpoint_policies
from jax.sharding import AxisType, NamedSharding

from coat_jax import recipes
from coat_jax.layers import (
  MLP,
  RESIDUAL_NAMES,
  Attention,
  Linear,
  NormLinear,
  RMSNorm,
  activate,
  with_weight_cache,
)
from coat_jax.recipes import MeshAxes
from tests.comparing import assert_close, jit
from tests.matrices import quick

D, F, B, T = 64, 96, 8, 16
NAMES = ("data", "fsdp", "tensor")


class Layer(nnx.Module):
  """A decoder layer: LayerNorm and biases, or RMSNorm and no bias."""

  def __init__(self, recipe, rngs, dtype=jnp.float32, use_bias=True):
    shared = dict(recipe=recipe, dtype=dtype, use_bias=use_bias, rngs=rngs)
    norm = dict(norm="layer", use_norm_bias=True) if use_bias else {}
    self.attention = Attention(D, 4, num_kv_heads=2, **norm, **shared)
    self.mlp = MLP(D, F, **norm, **shared)

  def __call__(self, x):
    return self.mlp(self.attention(x))


def make_mesh(sizes, kind=AxisType.Auto):
  return jax.make_mesh(sizes, NAMES, axis_types=(kind,) * 3)


def spec_of(path, p):
  """Returns the usual spec of a parameter; norms and biases are replicated."""
  name = jax.tree_util.keystr(path)
  if p.ndim == 1 or "bias" in name:
    return P()
  if "out" in name or "down" in name:
    return P(("tensor", "fsdp"))
  return P("fsdp", *(None,) * (p.ndim - 2), "tensor")


def build(make, recipe):
  """Returns (f, parameters), where f(parameters, x) runs the module."""
  graph = nnx.split(nnx.eval_shape(lambda: make(recipe)), nnx.Param)[0]
  single = dataclasses.replace(recipe, axes=None)
  params = nnx.to_pure_dict(nnx.split(make(single), nnx.Param)[1])

  def f(params, x):
    return with_weight_cache(nnx.merge(graph, params))(x)

  return f, params


def value_and_gradients(f):
  def g(params, x, dy):
    y, vjp = jax.vjp(f, params, x)
    if jax.sharding.get_abstract_mesh().explicit_axes:
      dy = jax.sharding.reshard(dy, jax.typeof(y).sharding.spec)
    return y, vjp(dy)

  return g


def arrays(shape=(B, T, D)):
  return tuple(jax.random.normal(jax.random.key(i), shape) for i in (1, 2))


def place(mesh, params, *tokens):
  params = jax.tree.map_with_path(
    lambda path, p: jax.device_put(p, NamedSharding(mesh, spec_of(path, p))),
    params,
  )
  batch = NamedSharding(mesh, P(("data", "fsdp")))
  return params, *jax.device_put(tokens, batch)


def on_mesh(recipe, **kwargs):
  return dataclasses.replace(recipe, axes=MeshAxes(tensor="tensor", **kwargs))


def check(
  make, recipe, sizes, kind=AxisType.Auto, *, out=D, tolerance=5e-5, **axes
):
  """Compares results on a mesh with results on one device."""
  x, dy = arrays()[0], arrays(shape=(B, T, out))[1]
  f, params = build(make, recipe)
  wanted = jit(value_and_gradients(f))(params, x, dy)
  f, _ = build(make, on_mesh(recipe, **axes))
  mesh = make_mesh(sizes, kind)
  with jax.set_mesh(mesh):
    found = jit(value_and_gradients(f))(*place(mesh, params, x, dy))
  assert_close(found, wanted, tolerance)


# With f32 activations, FP8 codes are the same as on one device. A different
# code in one operand would cause an error of 1e-3. Only the order of f32 sums
# differs. In each of the two blocks, sums of up to 128 values have an error of
# 128 * 2^-24 = 8e-6, which the tolerance of 5e-5 allows.
@pytest.mark.parametrize(
  "recipe, sizes, kind",
  quick(
    1,
    [
      (recipes.coat(), (2, 4, 1), AxisType.Auto),
      (recipes.coat(weight_cache="codes"), (2, 2, 2), AxisType.Auto),
      (
        recipes.coat(residuals="coat", attention="fp8", weight_cache="none"),
        (2, 2, 2),
        AxisType.Explicit,
      ),
      (recipes.fp8_linear(weight_cache="codes"), (1, 4, 2), AxisType.Auto),
      (recipes.fp8_linear(), (2, 2, 2), AxisType.Explicit),
    ],
  ),
)
def test_layer_on_a_mesh_matches_one_device(recipe, sizes, kind):
  # With seed 0, the order of sums changes a code on some CPUs.
  check(lambda r: Layer(r, nnx.Rngs(2)), recipe, sizes, kind)


def test_mlp_without_norm_or_residual_add_matches_one_device():
  def make(recipe):
    shared = dict(recipe=recipe, dtype=jnp.float32, rngs=nnx.Rngs(0))
    shared |= dict(norm=None, add_input=False, use_bias=True)
    return MLP(D, F, activation="gelu_tanh", gated=False, **shared)

  check(make, recipes.coat(), (2, 2, 2))


class PostNormed(nnx.Module):
  """A decoder layer with post norms; `norm` is the norm before the MLP."""

  def __init__(self, recipe, norm):
    shared = dict(post_norm="layer", use_norm_bias=True, use_bias=True)
    # With seed 0, the order of sums changes a code on some CPUs.
    shared |= dict(recipe=recipe, dtype=jnp.float32, rngs=nnx.Rngs(1))
    self.attention = Attention(D, 4, num_kv_heads=2, norm=None, **shared)
    self.mlp = MLP(D, F, norm=norm, activation="gelu_tanh", **shared)

  def __call__(self, x):
    return self.mlp(self.attention(x))


@pytest.mark.parametrize(
  "recipe, sizes, norm, kind",
  quick(
    1,
    [
      (recipes.coat(), (2, 2, 2), "rms", AxisType.Auto),
      (recipes.coat(), (1, 8, 1), None, AxisType.Auto),
      (recipes.coat(), (2, 2, 2), None, AxisType.Explicit),
      (recipes.fp8_linear(), (2, 2, 2), None, AxisType.Auto),
    ],
  ),
)
def test_post_norms_on_a_mesh_match_one_device(recipe, sizes, norm, kind):
  check(lambda r: PostNormed(r, norm), recipe, sizes, kind)


def test_gradients_can_be_summed_in_bfloat16():
  # Each device's sum is rounded to 8 significant bits, and so is the total.
  check(
    lambda r: Linear(D, F, recipe=r, dtype=jnp.float32, rngs=nnx.Rngs(0)),
    recipes.coat(),
    (4, 2, 1),
    out=F,
    tolerance=2**-7,
    grad_dtype="bfloat16",
  )


@pytest.mark.parametrize(
  "kind, splits",
  quick(
    1,
    [
      (AxisType.Auto, (None, None)),
      (AxisType.Explicit, (None, None)),
      (AxisType.Auto, ("columns", "inputs")),
    ],
  ),
)
def test_drop_in_layers_on_a_mesh_match_one_device(kind, splits):
  class Stack(nnx.Module):
    def __init__(self, recipe):
      shared = dict(recipe=recipe, dtype=jnp.float32, rngs=nnx.Rngs(0))
      self.norm = RMSNorm(D, **shared)
      self.first = Linear(D, F, split=splits[0], **shared)
      self.second = Linear(F, D, split=splits[1], **shared)
      self.recipe = nnx.static(recipe)

    def __call__(self, x):
      y = self.first(self.norm(x))
      how = dict(recipe=self.recipe)
      gelu = activate(y, activation="gelu_tanh", **how)
      y = gelu + activate(y, y, activation="silu", **how)
      return x + self.second(y)

  check(Stack, recipes.coat(), (2, 2, 2), kind)


class Reshaped(nnx.Module):
  """Calls a layer with x reshaped to [*shape, D]; returns [B, T, out]."""

  def __init__(self, layer, shape):
    self.layer, self.shape = layer, nnx.static(shape)

  def __call__(self, x):
    return self.layer(x.reshape(*self.shape, D)).reshape(B, T, -1)


@pytest.mark.parametrize(
  "shape", quick(1, map(pytest.param, [(B, T), (B * T,), (B, 2, T // 2)]))
)
@pytest.mark.parametrize("cache", quick(1, ["scale", "codes"]))
def test_column_split_linear_accepts_any_leading_axes(shape, cache):
  def make(recipe):
    shared = dict(recipe=recipe, dtype=jnp.float32, rngs=nnx.Rngs(0))
    return Reshaped(Linear(D, (2, F), split="columns", **shared), shape)

  check(make, recipes.coat(weight_cache=cache), (2, 2, 2), out=2 * F)


@pytest.mark.parametrize(
  "shape, sizes",
  quick(
    1,
    [
      ((B, T), (2, 2, 2)),
      ((B, 2, T // 2), (2, 2, 2)),
      ((B * T,), (2, 4, 1)),
    ],
  ),
)
def test_norm_linear_accepts_any_leading_axes(shape, sizes):
  def make(recipe):
    shared = dict(recipe=recipe, dtype=jnp.float32, rngs=nnx.Rngs(0))
    return Reshaped(NormLinear(D, F, **shared), shape)

  check(make, recipes.coat(), sizes, out=F)


def collectives(text):
  """Counts collectives in StableHLO, by (name, dtype, whether it is scalar)."""
  found, name = collections.Counter(), None
  for line in text.splitlines():
    if match := re.search(r'"stablehlo\.(all_\w+|reduce_scatter)"', line):
      name = match[1]
    # The type is on the same line, or at the end of the reduction's region.
    if name and (match := re.search(r": \(tensor<([^>]*)>\) -> ", line)):
      found[name, match[1].split("x")[-1], "x" not in match[1]] += 1
      name = None
  return found


def lowered_text(recipe, sizes):
  f, params = build(lambda r: Layer(r, nnx.Rngs(0), use_bias=False), recipe)
  mesh = make_mesh(sizes)
  with jax.set_mesh(mesh):
    args = place(mesh, params, *arrays())
    return jax.jit(value_and_gradients(f)).lower(*args).as_text()


def test_devices_exchange_codes_gradients_and_scalars():
  found = collectives(lowered_text(on_mesh(recipes.coat()), (2, 4, 1)))
  gathered = {k: v for k, v in found.items() if k[0] == "all_gather"}
  # Four weights are gathered in the forward and again in the backward pass.
  assert gathered == {("all_gather", "f8E4M3FN", False): 8}
  # The gradients of the four weights are summed and split over fsdp.
  assert found["reduce_scatter", "f32", False] == 4
  # Then they are summed over data, like the gradients of two norms.
  assert found["all_reduce", "f32", False] == 4 + 2
  # Largest magnitudes are reduced as integers: scalars for four operands in the
  # forward pass and four gradients in the backward pass, and arrays for four
  # weights, which are stacks of one layer.
  assert found["all_reduce", "i32", True] == 4 + 4
  assert found["all_reduce", "i32", False] == 4
  assert sum(found.values()) == 8 + 4 + 6 + 12


@pytest.mark.parametrize("recipe", [recipes.coat(), recipes.fp8_linear()])
def test_sequences_are_gathered_as_codes_between_tensor_parallel_blocks(recipe):
  found = collectives(lowered_text(on_mesh(recipe), (2, 2, 2)))
  kinds = {k[1] for k in found if k[0] == "all_gather"}
  assert kinds == {"f8E4M3FN", "f8E5M2"}


def residual_bytes(recipe, sizes=None):
  """Counts bytes that are saved for the backward pass, without parameters."""
  f, params = build(lambda r: Layer(r, nnx.Rngs(0), use_bias=False), recipe)

  def kept(params, x):
    return jax.tree.leaves(jax.vjp(f, params, x)[1])

  if sizes is None:
    shapes = jax.eval_shape(kept, params, arrays()[0])
  else:
    with jax.set_mesh(make_mesh(sizes)):
      shapes = jax.eval_shape(kept, params, arrays()[0])
  shapes = [s for s in shapes if s.dtype != jnp.float32 or s.ndim == 3]
  return sum(s.size * s.dtype.itemsize for s in shapes)


@pytest.mark.parametrize("cache", quick(1, ["scale", "codes"]))
def test_all_devices_together_save_as_much_as_one_device(cache):
  recipe = recipes.coat(weight_cache=cache)
  one = residual_bytes(recipe)
  assert residual_bytes(on_mesh(recipe), (2, 4, 1)) == pytest.approx(
    one, rel=0.02
  )


@pytest.mark.slow
def test_checkpoint_with_names_repeats_no_matmul_on_a_mesh():
  recipe = on_mesh(recipes.coat())
  f, params = build(lambda r: Layer(r, nnx.Rngs(0), use_bias=False), recipe)
  policy = checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
  mesh = make_mesh((2, 4, 1))
  with jax.set_mesh(mesh):
    args = place(mesh, params, *arrays())
    wanted = jax.jit(value_and_gradients(f))(*args)
    kept = jax.jit(value_and_gradients(jax.checkpoint(f, policy=policy)))
    assert_close(kept(*args), wanted)
    count = lambda g: g.lower(*args).as_text().count("dot_general")  # noqa: E731
    assert count(kept) == count(jax.jit(value_and_gradients(f)))


def test_block_outputs_match_inside_a_callers_shard_map():
  recipe = on_mesh(recipes.coat())
  f, params = build(lambda r: Layer(r, nnx.Rngs(0)), recipe)
  mesh = make_mesh((2, 4, 1))
  x = arrays()[0]
  with jax.set_mesh(mesh):
    wanted = jax.jit(f)(params, x)
    specs = jax.tree.map_with_path(spec_of, params)
    tokens = P(("data", "fsdp"), "tensor")
    inside = jax.shard_map(
      f, in_specs=(specs, tokens), out_specs=tokens, check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(inside)(params, x), wanted)


def test_unsupported_meshes_and_shapes_are_refused():
  recipe = on_mesh(recipes.coat())
  f, params = build(lambda r: Layer(r, nnx.Rngs(0)), recipe)
  x = arrays()[0]
  with pytest.raises(ValueError, match="got '.*for no mesh.*jax.set_mesh"):
    jax.eval_shape(f, params, x)
  with jax.set_mesh(make_mesh((2, 4, 1))):
    with pytest.raises(ValueError, match="got 7 for .*'fsdp': 4"):
      jax.eval_shape(f, params, x[:7])
  with jax.set_mesh(make_mesh((1, 2, 4))):
    with pytest.raises(ValueError, match="2 key heads.*got 4 devices"):
      jax.eval_shape(f, params, x)
  f, params = build(lambda r: MLP(D, F, recipe=r, rngs=nnx.Rngs(0)), recipe)
  with jax.set_mesh(make_mesh((2, 2, 2))):
    with pytest.raises(ValueError, match=r"x must be \[B, T, D\], got rows"):
      jax.eval_shape(f, params, x.reshape(-1, D))
    with pytest.raises(ValueError, match="got one token of 64 values; vmap"):
      jax.eval_shape(f, params, x[0, 0])
  f, params = build(
    lambda r: Linear(D, F, split="inputs", recipe=r, rngs=nnx.Rngs(0)), recipe
  )
  with jax.set_mesh(make_mesh((2, 2, 2))):
    with pytest.raises(ValueError, match="got 15 positions and 2 devices; pad"):
      jax.eval_shape(f, params, x[:, :15])
