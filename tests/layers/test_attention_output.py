# SPDX-License-Identifier: Apache-2.0
"""Tests attention with windows, soft caps, scales and segments."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

from coat_jax import recipes
from coat_jax.layers import dot_product_attention
from coat_jax.ops import AttentionKind
from coat_jax.recipes import MeshAxes
from tests.comparing import assert_close, jit
from tests.layers import straight_through
from tests.layers.attention_output import attention_output
from tests.matrices import quick
from tests.ops.naive_attention import naive_attention, seen

B, T, D, N, K, H = 8, 12, 32, 4, 2, 8
RECIPES = {
  "bf16": recipes.bf16(),
  "coat": recipes.coat(),
  "fp8": recipes.coat(attention="fp8"),
}
OPTIONS = dict(window=3, soft_cap=0.8, scale=0.7)
# Row by row: two documents, padding at the end, recurring ids, one document.
ROWS = [[0] * 5 + [1] * 7, [3] * 10 + [-1] * 2, [0, 1] * 6, [7] * 12]
SEGMENTS = np.array(2 * ROWS, np.int32)


def case(batch=B, t=T):
  """Returns random x, q, k, v, w, bias and dy."""
  rng = np.random.default_rng(0)
  shapes = [(batch, t, D), (batch, t, N, H), (batch, t, K, H), (batch, t, K, H)]
  shapes += [(N * H, D), (D,), (batch, t, D)]
  return [jnp.float32(rng.normal(size=shape)) for shape in shapes]


def value_and_gradients(f, args, segments, dy):
  y, vjp = jax.vjp(lambda *args: f(*args, segments=segments), *args)
  if jax.sharding.get_abstract_mesh().explicit_axes:
    dy = jax.sharding.reshard(dy, jax.typeof(y).sharding.spec)
  return y, vjp(dy)


@functools.partial(jit, static_argnames=("recipe", "options"))
def layer(args, segments, dy, recipe, options):
  f = functools.partial(attention_output, recipe=recipe, **dict(options))
  return value_and_gradients(f, args, segments, dy)


@functools.partial(jit, static_argnames=("recipe", "options"))
def attend(args, segments, dy, recipe=None, options=()):
  f = functools.partial(dot_product_attention, recipe=recipe, **dict(options))
  return value_and_gradients(f, args, segments, dy)


def items(options):
  return tuple(options.items())


CHOICES = quick(
  1,
  [OPTIONS, *({name: OPTIONS[name]} for name in OPTIONS), dict(causal=False)],
)


@pytest.mark.parametrize("options", CHOICES, ids=str)
def test_every_option_of_dot_product_attention_matches_the_formula(options):
  _, q, k, v, *_ = case()
  kind = AttentionKind(**options)
  found = attend((q, k, v), SEGMENTS, jnp.sin(q), options=items(options))
  f = functools.partial(
    naive_attention,
    mask=seen(T, T, kind, SEGMENTS),
    scale=kind.scale or H**-0.5,
    cap=kind.soft_cap,
  )
  (out, lse), vjp = jax.vjp(f, q, k, v)
  assert_close(found, (out, vjp((jnp.sin(q), jnp.zeros_like(lse)))))


@pytest.mark.parametrize("kept", ["bf16", "fp8"])
@pytest.mark.parametrize("options", CHOICES, ids=str)
def test_every_option_of_attention_output_matches_the_formula(options, kept):
  *args, dy = case()
  recipe = recipes.coat(attention=kept)
  found = layer(args, SEGMENTS, dy, recipe, items(options))

  @jit
  def oracle(*args):
    f = functools.partial(
      straight_through.attention_output,
      kept=kept,
      kind=AttentionKind(**options),
      ids=SEGMENTS,
    )
    y, vjp = jax.vjp(f, *args)
    return y, vjp(dy)

  # As in test_attention, a code of the output may differ from the oracle's.
  assert_close(found, oracle(*args))


@pytest.mark.parametrize("name", quick(1, ["fp8", "bf16", "coat"]))
def test_packed_documents_do_not_affect_each_other(name):
  """Packing changes no scale, so this holds for FP8 too."""
  *args, dy = case(batch=4, t=6)
  options = items(OPTIONS)
  y, gradients = layer(args, None, dy, RECIPES[name], options)
  pack = lambda x: x.reshape(2, 12, *x.shape[2:])  # noqa: E731
  args[:4], dy = map(pack, args[:4]), pack(dy)
  ids = jnp.int32([[0] * 6 + [1] * 6] * 2)
  packed, packed_gradients = layer(args, ids, dy, RECIPES[name], options)
  assert_close(packed, pack(y), 1e-6)
  gradients = *map(pack, gradients[:4]), *gradients[4:]
  assert_close(packed_gradients, gradients, 2e-6)


MESHES = [
  ((2, 2, 2), AxisType.Auto),
  ((1, 8, 1), AxisType.Auto),
  ((2, 4, 1), AxisType.Explicit),
  ((2, 2, 2), AxisType.Explicit),
]


def on_mesh(sizes, kind, recipe):
  """Returns a mesh, a recipe for it, and a function that shards arrays."""
  names = ("data", "fsdp", "tensor")
  mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * 3)
  if kind == AxisType.Auto:
    recipe = dataclasses.replace(recipe, axes=MeshAxes(tensor="tensor"))

  def put(x):
    spec = P(("data", "fsdp"), None, *("tensor",) * (x.ndim == 4))
    if x.shape[0] != B:
      spec = P(*(("tensor", "fsdp"), None)[: x.ndim - 1])
    return jax.device_put(x, NamedSharding(mesh, spec))

  return mesh, recipe, functools.partial(jax.tree.map, put)


@pytest.mark.parametrize("sizes, kind", quick(1, MESHES))
def test_attention_with_segments_on_a_mesh_matches_one_device(sizes, kind):
  _, q, k, v, *_ = case()
  args = (q, k, v), jnp.asarray(SEGMENTS), jnp.sin(q)
  options = items(OPTIONS)
  wanted = attend(*args, recipes.bf16(), options)
  mesh, recipe, put = on_mesh(sizes, kind, recipes.bf16())
  with jax.set_mesh(mesh):
    found = attend(*put(args), recipe, options)
  assert_close(found, wanted, 1e-6)


@pytest.mark.parametrize("sizes, kind", quick(1, MESHES[::-1]))
def test_output_block_with_segments_on_a_mesh_matches_one_device(sizes, kind):
  *args, dy = case()
  args, options = (args, jnp.asarray(SEGMENTS), dy), items(OPTIONS)
  wanted = layer(*args, RECIPES["fp8"], options)
  mesh, recipe, put = on_mesh(sizes, kind, RECIPES["fp8"])
  with jax.set_mesh(mesh):
    found = layer(*put(args), recipe, options)
  # Codes match. Only the order of f32 sums over 96 tokens differs.
  assert_close(found, wanted, 1e-5)
