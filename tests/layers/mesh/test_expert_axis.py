# SPDX-License-Identifier: Apache-2.0
"""Tests experts split over devices: results, and bytes exchanged."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P, lax
from jax.sharding import AxisType

from coat_jax import recipes
from coat_jax.layers import MoE, exchange, routing
from coat_jax.mesh import run_on_shards
from coat_jax.recipes import MeshAxes
from tests.comparing import assert_close, jit
from tests.layers.mesh.mixtures import D, F, K, build
from tests.layers.mesh.placing import assert_sharded_like, place
from tests.matrices import quick

E, B, T = 8, 8, 8
NAMES = ("data", "fsdp", "expert", "tensor")
AXES = MeshAxes(batch=NAMES[:3], tensor="tensor", expert="expert")
SPECS = {
  "gate_up": P("expert", "fsdp", None, "tensor"),
  "down": P("expert", ("tensor", "fsdp")),
}
FP8 = recipes.coat(experts="fp8")
CODES = recipes.coat(experts="fp8", weight_cache="codes")
UNCACHED = recipes.coat(experts="fp8", weight_cache="none")


def spec_of(path, p):
  return SPECS.get(path[-1].key, P())


def arrays():
  return tuple(jax.random.normal(jax.random.key(i), (B, T, D)) for i in (1, 2))


def make_mesh(sizes, kind=AxisType.Auto):
  return jax.make_mesh(sizes, NAMES, axis_types=(kind,) * len(NAMES))


def on_mesh(recipe, sizes, params, x, dy, kind=AxisType.Auto):
  f, _ = build(dataclasses.replace(recipe, axes=AXES), E)
  mesh = make_mesh(sizes, kind)
  with jax.set_mesh(mesh):
    params = place(mesh, spec_of, params)
    x, dy = place(mesh, lambda *_: P(AXES.batch), (x, dy))
    found = jit(f)(params, x, dy)
  assert_sharded_like(found[1][0], params)
  return found


# As in test_moe, a different code would cause an error of 1e-3. The tolerance
# of 5e-5 allows only for a different summation order.
@pytest.mark.parametrize(
  "recipe, sizes, kind",
  quick(
    1,
    [
      (CODES, (1, 2, 2, 2), AxisType.Auto),
      (FP8, (1, 2, 2, 2), AxisType.Auto),
      (recipes.coat(), (1, 2, 2, 2), AxisType.Auto),
      (recipes.bf16(), (1, 2, 2, 2), AxisType.Auto),
      (FP8, (2, 1, 4, 1), AxisType.Auto),
      (recipes.coat(), (2, 1, 4, 1), AxisType.Auto),
      (recipes.bf16(), (1, 2, 4, 1), AxisType.Auto),
      (recipes.fp8_linear(), (1, 1, 8, 1), AxisType.Auto),
      (UNCACHED, (2, 1, 4, 1), AxisType.Auto),
      (FP8, (2, 1, 2, 2), AxisType.Explicit),
      (CODES, (2, 1, 2, 2), AxisType.Explicit),
    ],
  ),
)
def test_experts_on_several_devices_match_one_device(recipe, sizes, kind):
  x, dy = arrays()
  f, params = build(recipe, E)
  wanted = jit(f)(params, x, dy)
  assert_close(on_mesh(recipe, sizes, params, x, dy, kind), wanted, 5e-5)


def without_preference(params):
  """Makes all logits equal, so that all tokens choose experts 0 and 1."""
  return params | dict(router=jnp.zeros((D, E)))


@pytest.mark.parametrize("recipe", quick(1, [FP8, recipes.bf16()]))
def test_all_tokens_may_choose_the_experts_of_one_device(recipe):
  x, dy = arrays()
  f, params = build(recipe, E)
  params = without_preference(params)
  wanted = jit(f)(params, x, dy)
  assert wanted[0][1][1].load[:2].tolist() == [1, 1]
  assert_close(on_mesh(recipe, (2, 1, 4, 1), params, x, dy), wanted, 5e-5)


def ragged_all_to_all(x, out, begins, sizes, begins_there, found, *, axis_name):
  """Implements `lax.ragged_all_to_all` as documented, for CPUs."""
  n, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
  sent = lax.all_gather((x, begins, sizes, begins_there), axis_name)
  each, places = len(sizes) // n, jnp.arange(len(x))
  for i in range(n * each):
    source, slice_ = i // each, me * each + i % each
    rows, begin, size, there = (
      a[source] if a is sent[0] else a[source, slice_] for a in sent
    )
    rows = rows[jnp.clip(begin + places, 0, len(x) - 1)]
    # Values are undefined if sender and receiver disagree on the size.
    rows = jnp.where(size == found[i], rows, jnp.nan).astype(x.dtype)
    to = jnp.where(places < size, there + places, len(out))
    out = out.at[to].set(rows, mode="drop")
  return out


@pytest.fixture(params=["padded", "ragged"])
def how(request, monkeypatch):
  if request.param == "ragged":
    monkeypatch.setattr(exchange, "target", lambda: "cuda")
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)


# COUNTS[s, e] is the number of rows that device s sends to expert e. Each
# device sends 12 rows in all. Two devices send all their rows to one expert.
COUNTS = np.array([[3, 0, 4, 5], [0, 0, 0, 12], [12, 0, 0, 0], [1, 2, 9, 0]])


def test_rows_arrive_at_their_expert_and_return(how):
  del how
  n, rows = COUNTS.shape[0], int(COUNTS[0].sum())
  own = np.arange(1.0, n * rows + 1, dtype=np.float32).reshape(n, rows)

  def there_and_back(x, counts):
    plan, sizes = exchange.plan_exchange(counts, rows, "expert")
    arrived, transpose = jax.vjp(lambda x: exchange.send_rows(x, plan), x)
    is_used = jnp.arange(n * rows) < jnp.sum(sizes)
    marked = jnp.where(is_used, arrived, jnp.nan)
    back = exchange.send_back(marked, plan)
    return arrived, sizes, back, transpose(marked)[0]

  mesh = jax.make_mesh((n,), ("expert",), axis_types=(AxisType.Auto,))
  with jax.set_mesh(mesh):
    arrived, sizes, back, transposed = jit(
      lambda *args: run_on_shards(
        there_and_back, *args, in_specs=P("expert"), out_specs=P("expert")
      )
    )(own.reshape(-1), COUNTS.reshape(-1))
  ends = np.cumsum(COUNTS, axis=1)
  for e in range(4):
    wanted = [own[s, ends[s, e] - COUNTS[s, e] : ends[s, e]] for s in range(n)]
    wanted = np.concatenate(wanted)
    found = np.asarray(arrived).reshape(n, -1)[e]
    np.testing.assert_array_equal(found[: len(wanted)], wanted)
    assert not found[len(wanted) :].any()  # Unused rows are zero.
  assert sizes.tolist() == COUNTS.sum(0).tolist()
  # NaN in unused rows must not reach any result.
  np.testing.assert_array_equal(back, own.reshape(-1))
  np.testing.assert_array_equal(transposed, own.reshape(-1))


def test_ragged_exchange_matches_one_device(monkeypatch):
  x, dy = arrays()
  f, params = build(FP8, E)
  wanted = jit(f)(params, x, dy)
  monkeypatch.setattr(exchange, "target", lambda: "cuda")
  monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
  assert_close(on_mesh(FP8, (2, 1, 4, 1), params, x, dy), wanted, 5e-5)


@pytest.mark.parametrize(
  "recipe", quick(1, [FP8, recipes.coat(), recipes.bf16()])
)
def test_unused_rows_change_nothing(recipe, monkeypatch):
  """Puts NaN into unused rows, which no amax or gradient may read."""

  def poisoned(x, plan):
    rows = exchange.send_rows(x, plan)
    if rows.shape[-1] == 1:  # Weights p of unused rows must stay 0.
      return rows
    is_used = jnp.arange(len(rows)) < jnp.sum(plan.received.sizes)
    is_used = is_used.reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.where(is_used, rows, jnp.nan).astype(x.dtype)

  x, dy = arrays()
  _, params = build(recipe, E)
  wanted = on_mesh(recipe, (2, 1, 4, 1), params, x, dy)
  monkeypatch.setattr(routing, "send_rows", poisoned)
  assert_close(on_mesh(recipe, (2, 1, 4, 1), params, x, dy), wanted, 1e-6)


def traced(recipe, sizes=(2, 1, 4, 1)):
  """Traces a layer's gradients on a mesh, with BF16 activations."""
  f, params = build(dataclasses.replace(recipe, axes=AXES), E, jnp.bfloat16)
  mesh = make_mesh(sizes)
  with jax.set_mesh(mesh):
    params = place(mesh, spec_of, params)
    x, dy = place(mesh, lambda *_: P(AXES.batch), arrays())
    return jit(f).trace(params, x.astype(jnp.bfloat16), dy)


# Maps dtypes, as programs name them, to bytes per value.
ITEM_SIZES = dict(f8_e4m3fn=1, f8_e5m2=1, bf16=2)


def exchanged(recipe):
  """Counts the bytes of rows that a device exchanges, by dtype."""
  found = dict.fromkeys(ITEM_SIZES, 0)
  program = str(traced(recipe).jaxpr)
  for dtype, sizes in re.findall(r":(\w+)\[([\d,]+)\] = all_to_all", program):
    sizes = [*map(int, sizes.split(","))]
    if sizes[-1] > 1:  # Leave out routing weights.
      found[dtype] += math.prod(sizes) * ITEM_SIZES[dtype]
  return found


# tests/aot/test_experts.py checks the same formats in programs for GPUs.
def test_each_recipe_exchanges_rows_in_its_formats():
  # Each of the eight devices has B * T * K / 8 rows. With padding, it sends as
  # many rows to each of four devices.
  values = 4 * (B * T * K // 8) * D
  # FP8 experts exchange tokens as E4M3 in both passes, and gradients of outputs
  # as E5M2. Outputs and gradients of tokens are in BF16.
  codes = dict(f8_e4m3fn=2 * values, f8_e5m2=values)
  assert exchanged(FP8) == codes | dict(bf16=2 * 2 * values)
  # With the `coat` recipe, tokens are codes with one BF16 scale per 16 values.
  # Gradients are in BF16.
  codes = dict(f8_e4m3fn=2 * values, f8_e5m2=0)
  scales = 2 * 2 * values // 16
  assert exchanged(recipes.coat()) == codes | dict(bf16=scales + 3 * 2 * values)
  only_bf16 = dict(f8_e4m3fn=0, f8_e5m2=0, bf16=5 * 2 * values)
  assert exchanged(recipes.bf16()) == only_bf16


@pytest.mark.parametrize(
  "recipe", quick(1, [FP8, recipes.coat(), recipes.bf16()])
)
def test_no_device_gathers_the_experts_of_others(recipe):
  compiled = traced(recipe, (1, 1, 8, 1)).lower().compile()
  found = {
    math.prod(map(int, sizes.split(",")))
    for sizes in re.findall(r"\w\[([\d,]+)\]", compiled.as_text())
  }
  gate_up, down = E * D * 2 * F, E * F * D
  assert {gate_up // 8, down // 8} <= found
  assert not {gate_up, down} & found


@pytest.mark.parametrize(
  "recipe", quick(1, [FP8, recipes.coat(), recipes.bf16()])
)
def test_received_rows_are_not_saved(recipe):
  recipe = dataclasses.replace(recipe, axes=AXES)
  m = nnx.eval_shape(lambda: MoE(D, F, E, K, recipe=recipe, rngs=nnx.Rngs(0)))
  graph, params = nnx.split(m)
  x = jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16)
  with jax.set_mesh(make_mesh((2, 1, 4, 1))):
    saved = jax.eval_shape(
      lambda p, x: jax.tree.leaves(
        jax.vjp(lambda p, x: nnx.merge(graph, p)(x), p, x)[1]
      ),
      params,
      x,
    )
  # Apart from the weights, no saved array is larger than x.
  of_weights = E * D * 2 * F, E * F * D
  assert max(a.size for a in saved if a.size not in of_weights) == B * T * D


def test_experts_that_do_not_split_evenly_are_refused():
  f, params = build(dataclasses.replace(recipes.coat(), axes=AXES), E)
  params = jax.tree.map(lambda p: p[:6] if p.shape[0] == E else p, params)
  params |= dict(router=params["router"][:, :6])
  with jax.set_mesh(make_mesh((2, 1, 4, 1))):
    with pytest.raises(ValueError, match="split evenly by .*'expert'.*got 6"):
      jax.eval_shape(f, params, *arrays())
