# SPDX-License-Identifier: Apache-2.0
"""Tests steps that run on each device's shard of a leaf, as kernels must."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from coat_jax import coat_adamw, codecs
from coat_jax.optimizer import (
  adam,
  fused_coat_adamw,
  split_weights,
  state_shardings,
)
from tests.comparing import assert_same_bits
from tests.matrices import quick

# Leaves are sharded along rows, rows and columns, layers and columns, a middle
# axis, or none. The moments of "norm" stay f32.
LEAVES = {
  "rows": ((16, 256), jax.P(("x", "y"))),
  "both": ((8, 1024), jax.P("x", "y")),
  "layers": ((4, 8, 512), jax.P("x", None, "y")),
  "middle": ((3, 8, 256), jax.P(None, ("y", "x"))),
  "everywhere": ((64, 128), jax.P()),
  "norm": ((8,), jax.P("x")),
}
OPTIONS = dict(learning_rate=1e-2, weight_decay=0.1, seed=5)


def make_mesh(kind):
  return jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)


def tree(seed, mesh=None, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  out = {}
  for name, (shape, spec) in LEAVES.items():
    x = jnp.asarray(rng.normal(size=shape), dtype)
    out[name] = jax.device_put(x, NamedSharding(mesh, spec)) if mesh else x
  return out


def quantize_mask(path, leaf):
  return leaf.ndim > 1


def fused_step(optimizer):
  def step(params, state, grads):
    return optimizer.apply(grads, state, params, grad_scale=0.5)

  return step


def chained_step(optimizer):
  def step(params, state, grads):
    updates, state = optimizer.update(grads, state, params)
    return jax.tree.map(lambda p, u: p + u, params, updates), state

  return step


KINDS = {
  "fused": (fused_coat_adamw, fused_step),
  "low_bits": (functools.partial(fused_coat_adamw, low_bits=True), fused_step),
  "chained": (coat_adamw, chained_step),
}


def run(name, codec, dtype, mesh=None, **options):
  """Takes two steps; returns (parameters, state) and the compiled text."""
  make, step_of = KINDS[name]
  optimizer = make(
    **OPTIONS, codec=codec, quantize_mask=quantize_mask, **options
  )
  params = tree(0, mesh, dtype)
  state = optimizer.init(params)
  if mesh is not None:
    where = state_shardings(optimizer.init, params)
    state = jax.device_put(state, where)
  if name == "low_bits":
    params, _ = jax.jit(split_weights)(params)
  first, second = (tree(seed, mesh, dtype) for seed in (1, 2))
  lowered = jax.jit(step_of(optimizer)).lower(params, state, first)
  # The compiled step accepts only the shardings of its first arguments.
  step = lowered.compile()
  params, state = step(*step(params, state, first), second)
  return (params, state), step.as_text()


@functools.cache
def on_one_device(name, codec, dtype):
  return run(name, codec, dtype)[0]


@pytest.mark.parametrize(
  "name, codec, dtype, kind",
  quick(
    0,
    [
      ("fused", "coat", jnp.bfloat16, AxisType.Auto),
      ("low_bits", "coat", jnp.float32, AxisType.Auto),
      ("low_bits", "log8", jnp.float32, AxisType.Explicit),
      ("fused", "log8", jnp.float32, AxisType.Explicit),
      ("chained", "coat", jnp.float32, AxisType.Auto),
      ("chained", "coat_e8m0", jnp.float32, AxisType.Explicit),
    ],
  ),
)
def test_step_on_shards_matches_one_device(name, codec, dtype, kind):
  codec = getattr(codecs, codec)()
  mesh = make_mesh(kind)
  shardings = None
  if kind == AxisType.Auto:
    shardings = jax.tree.map(lambda x: x.sharding, tree(0, mesh))
  with jax.set_mesh(mesh):
    got, text = run(name, codec, dtype, mesh, shardings=shardings)
  assert_same_bits(got, on_one_device(name, codec, dtype))
  for operation in ("all-gather", "all-reduce", "all-to-all", "permute"):
    assert operation not in text
  # Results are sharded like the parameters of the first step.
  for leaf, (shape, spec) in LEAVES.items():
    where = NamedSharding(mesh, spec)
    assert got[0][leaf].sharding.is_equivalent_to(where, len(shape))
    if name == "low_bits" and leaf != "norm":
      assert got[1].low[leaf].sharding.is_equivalent_to(where, len(shape))


def test_every_leaf_runs_inside_shard_map(monkeypatch):
  """The compiler cannot partition a kernel, so all axes must be manual."""
  found = []

  @functools.wraps(adam.adamw_step.definition)
  def step(*args, **kwargs):
    mesh = jax.sharding.get_abstract_mesh()
    found.append(set(mesh.manual_axes))
    return definition(*args, **kwargs)

  definition = adam.adamw_step.definition
  op = dataclasses.replace(adam.adamw_step, definition=step)
  monkeypatch.setattr(adam, "adamw_step", op)
  params = tree(0, make_mesh(AxisType.Auto))
  shardings = jax.tree.map(lambda x: x.sharding, params)
  optimizer = fused_coat_adamw(
    **OPTIONS, quantize_mask=quantize_mask, shardings=shardings
  )
  state = jax.eval_shape(optimizer.init, params)
  jax.eval_shape(fused_step(optimizer), params, state, params)
  assert found and all(axes == {"x", "y"} for axes in found)


def test_step_with_groups_split_over_devices_matches_one_device():
  mesh = make_mesh(AxisType.Auto)
  params = {"w": jnp.ones((8, 384))}
  where = {"w": NamedSharding(mesh, jax.P("x", "y"))}
  single = fused_coat_adamw(**OPTIONS, quantize_mask=quantize_mask)
  state = single.init(params)
  want = jax.jit(fused_step(single))(params, state, params)
  optimizer = fused_coat_adamw(
    **OPTIONS, quantize_mask=quantize_mask, shardings=where
  )
  placed = jax.device_put(params, where)
  got = jax.jit(fused_step(optimizer))(placed, state, placed)
  assert_same_bits(got, want)


def test_explain_describes_the_shard_of_a_device():
  mesh = make_mesh(AxisType.Auto)
  params = {"w": jnp.ones((64, 1024)), "narrow": jnp.ones((8, 256))}
  where = {"w": jax.P("x"), "narrow": jax.P("x", "y")}
  where = {k: NamedSharding(mesh, spec) for k, spec in where.items()}
  optimizer = fused_coat_adamw(
    **OPTIONS, quantize_mask=quantize_mask, shardings=where
  )
  said = optimizer.explain(params)
  assert (
    said["w"]
    == "adamw_step: mosaic on a GPU, mosaic_tpu on a TPU, xla elsewhere"
  )
  assert "must be a multiple of 8, got 2" in said["narrow"]


def test_wrong_and_missing_shardings_are_refused():
  params = {"w": jnp.ones((8, 256)), "v": jnp.ones((8, 256))}
  with pytest.raises(TypeError, match="must be NamedShardings.*P"):
    optimizer = fused_coat_adamw(**OPTIONS, shardings={"w": jax.P("x")})
    optimizer.apply(params, optimizer.init(params), params)
  where = NamedSharding(make_mesh(AxisType.Auto), jax.P())
  with pytest.raises(ValueError, match="got none for 'v'"):
    optimizer = fused_coat_adamw(**OPTIONS, shardings={"w": where})
    optimizer.apply(params, optimizer.init(params), params)
  # XLA would abort the process.
  where = dict.fromkeys(params, where)
  old = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
  on_old = dict.fromkeys(params, NamedSharding(old, jax.P("x")))
  optimizer = coat_adamw(1e-3, shardings=on_old)
  placed = jax.device_put(params, where)
  with pytest.raises(ValueError, match="got mesh {'x': 2.* on mesh {'x': 4"):
    jax.jit(optimizer.update)(placed, optimizer.init(placed), placed)
