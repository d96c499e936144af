# SPDX-License-Identifier: Apache-2.0
"""Tests `encoded`, which stores the state of any optax optimizer in a codec.

With the f32 codec, results are compared with the optimizer itself. With other
codecs, Adam's state is compared with that of `scale_by_coat_adam`, which is
implemented separately.
"""

import doctest
import importlib
import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

from coat_jax import codecs, encoded, scale_by_coat_adam
from coat_jax.optimizer import (
  abstract_state,
  conversion,
  default_field_rule,
  fields,
  from_integers,
  from_plain_state,
  state_bytes,
  state_report,
  to_integers,
  to_plain_state,
)
from tests.comparing import assert_close, assert_same_bits, jit
from tests.matrices import quick
from tests.optimizer.solvers import types

SOLVERS = {
  "lion": lambda: optax.lion(1e-2),
  "muon": lambda: optax.contrib.muon(1e-2),
  "momentum": lambda: optax.sgd(1e-1, momentum=0.9),
  "nesterov": lambda: optax.sgd(1e-1, momentum=0.9, nesterov=True),
  "adan": lambda: optax.adan(1e-2),
  "adafactor": lambda: optax.adafactor(1e-2, momentum=0.9),
  "adabelief": lambda: optax.adabelief(1e-2),
  "lamb": lambda: optax.lamb(1e-2),
  "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
  "prodigy": lambda: optax.contrib.prodigy(1.0),
}
# Some rows consist of whole groups of 4; others end with a short group.
CODEC = codecs.coat(4)


def tree(seed=0, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  shapes = {"w": (8, 10), "norm": {"scale": (6,)}, "e": (16, 8)}
  return jax.tree.map(
    lambda shape: jnp.asarray(rng.normal(size=shape), dtype),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def mask(path, leaf):
  return leaf.ndim > 1


def wrap(inner, codec=CODEC, **kwargs):
  return encoded(inner, codec, quantize_mask=mask, **kwargs)


def run(solver, params, count=3, dtype=jnp.float32):
  """Takes `count` steps in one program; returns (parameters, state)."""

  def step(carry, grads):
    params, state = carry
    updates, state = solver.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), None

  grads = jax.tree.map(
    lambda *x: jnp.stack(x), *(tree(i + 1, dtype) for i in range(count))
  )
  # `scan` also checks that the types of the state do not change.
  scan = jit(lambda carry, grads: jax.lax.scan(step, carry, grads)[0])
  return scan((params, solver.init(params)), grads)


def stored(inner):
  """Returns the dtypes of the codes in a state, by path."""
  return {
    jax.tree_util.keystr(keys, simple=True, separator="/"): x.dtype.name
    for keys, x in jax.tree_util.tree_flatten_with_path(inner)[0]
    if "/codes" in jax.tree_util.keystr(keys, simple=True, separator="/")
  }


@pytest.mark.parametrize("name", quick(1, SOLVERS))
def test_float32_codec_matches_the_inner_optimizer(name):
  inner, codec = SOLVERS[name](), codecs.float32()
  params, state = run(wrap(inner, codec), tree())
  want, want_state = run(inner, tree())
  assert_same_bits(params, want)
  plain = to_plain_state(state)
  assert jax.tree.structure(plain) == jax.tree.structure(want_state)
  assert_same_bits(plain, want_state)
  like = jax.eval_shape(wrap(inner, codec).init, tree())
  back = from_plain_state(plain, like, count=3)
  assert jax.tree.structure(back) == jax.tree.structure(state)
  assert_same_bits(back, state)


def test_inner_optimizer_gets_f32_gradients():
  inner, grads = optax.adam(1e-2), tree(1, "bfloat16")
  state: Any = wrap(inner, codecs.float32()).init(tree())
  _, state = wrap(inner, codecs.float32()).update(grads, state, tree())
  in_f32 = jax.tree.map(lambda g: g.astype("float32"), grads)
  _, want = inner.update(in_f32, inner.init(tree()), tree())
  assert_same_bits(to_plain_state(state), want)


@pytest.mark.slow
def test_encoded_adam_matches_scale_by_coat_adam():
  # Both optimizers round with the same random words.
  for codec in (CODEC, codecs.log8(4)):
    ours = wrap(optax.scale_by_adam(), codec, seed=5)
    adam = scale_by_coat_adam(codec=codec, quantize_mask=mask, seed=5)
    _, got = run(ours, tree())
    _, want = run(adam, tree())
    assert got.count == want.count
    for field, theirs in ((got.inner.mu, want.mu), (got.inner.nu, want.nu)):
      for part in ("codes", "amax", "range"):
        a, b = getattr(field, part), getattr(theirs, part)
        # The two implementations of Adam differ by a few ulps of f32.
        assert types(a) == types(b)
        assert_close(
          jax.tree.map(lambda x: x.astype("float32"), a),
          jax.tree.map(lambda x: x.astype("float32"), b),
          tolerance=2e-6,
        )
        if part == "codes":
          assert_same_bits(a["w"], b["w"])
          assert_same_bits(a["e"], b["e"])


def test_fields_of_a_partitioned_state_are_found():
  params = tree()
  state = jax.eval_shape(wrap(SOLVERS["muon"]()).init, params)
  muon, adam = "inner/inner_states/muon/", "inner/inner_states/adam/"
  assert stored(state) == {
    f"{muon}inner_state/0/mu/codes/w": "float8_e4m3fn",
    f"{muon}inner_state/0/mu/codes/e": "float8_e4m3fn",
    f"{adam}inner_state/0/mu/codes/norm/scale": "float32",
    f"{adam}inner_state/0/nu/codes/norm/scale": "float32",
  }
  size = state_bytes(state)
  assert size.parameters == sum(x.size for x in jax.tree.leaves(params))
  # The codes of w and e, and 5 bytes for each of their groups.
  codes = 80 + 5 * 8 * 3 + 128 + 5 * 16 * 2
  # Optax's counts and Muon's coefficients.
  others = [
    x
    for x in jax.tree.leaves(jax.eval_shape(SOLVERS["muon"]().init, params))
    if x.shape not in ((8, 10), (16, 8), (6,))
  ]
  rest = sum(x.size * x.dtype.itemsize for x in others)
  # Each moment of the norm's scale has 24 bytes, and two placeholders with 5
  # bytes. Our count has 4.
  assert size.total == codes + 2 * (24 + 5) + 4 + rest


def only(name):
  """Returns a rule that encodes only the fields called `name`."""
  return lambda path: (
    default_field_rule(path) or "mu" if path.split("/")[-1] == name else None
  )


def test_rules_choose_fields():
  params = tree()
  free = optax.contrib.schedule_free_adamw(1e-2)

  def chosen(inner=free, **kwargs):
    state = jax.eval_shape(wrap(inner, codecs.log8(4), **kwargs).init, params)
    found = stored(state)
    return {k.rpartition("/w")[0]: v for k, v in found.items() if "/w" in k}

  base = "inner/base_optimizer_state/0/nu"
  assert chosen() == {f"{base}/codes": "uint8"}
  assert chosen(fields=only("z")) == {"inner/z/codes": "int8"}
  assert chosen(fields=lambda x: "mu" if x.endswith("0/nu") else None) == {
    f"{base}/codes": "int8"
  }
  every = chosen(fields=lambda path: default_field_rule(path) or "mu")
  assert every == chosen() | {"inner/z/codes": "int8"}
  # Parameters may be a single array, and a field's path may have no prefix.
  solver = encoded(optax.scale_by_adam(), fields=only("nu"))
  one: Any = jax.eval_shape(solver.init, jnp.ones((64, 64)))
  assert one.inner.nu.codes.dtype == jnp.float8_e4m3fn
  assert one.inner.mu.dtype == jnp.float32


def test_fields_that_cannot_be_encoded_are_refused():
  def init(inner, params=None, **kwargs):
    return wrap(inner, **kwargs).init(tree() if params is None else params)

  lion = optax.lion(1e-3)
  for error, match, make in (
    (ValueError, "got 'second'", lambda: init(lion, fields=lambda _: "second")),
    (ValueError, "without one", lambda: init(lion, fields=only("nu"))),
    (ValueError, "without one to encode", lambda: init(optax.sgd(1e-3))),
    (
      ValueError,
      "bfloat16 at '0/mu'",
      lambda: init(optax.lion(1e-3, mu_dtype="bfloat16")),
    ),
    (TypeError, "int32 at 'w'", lambda: init(lion, {"w": jnp.ones(3, int)})),
  ):
    with pytest.raises(error, match=match):
      make()
  solver = wrap(lion)
  state = solver.init(tree())
  with pytest.raises(ValueError, match=r"got \(3,\) for \(16, 8\) at 'e'"):
    solver.update(tree() | {"e": jnp.ones(3)}, state)
  with pytest.raises(ValueError, match="made with the codec 'log8'"):
    wrap(lion, codecs.log8(4)).update(tree(), state)
  with pytest.raises(
    ValueError, match="contain an EncodedState.*of encoded or"
  ):
    to_plain_state(lion.init(tree()))
  with pytest.raises(ValueError, match="opt_state must have the structure of"):
    from_plain_state((), state)


def test_arguments_of_the_wrong_type_are_refused():
  # Call without beartype, which users do not have.
  make = inspect.unwrap(encoded)
  for match, f in (
    ("got lion; call it, as in lion", lambda: make(optax.lion)),
    ("got 'lion'; pass an optax optimizer", lambda: make("lion")),
  ):
    with pytest.raises(TypeError, match=match):
      f()


@pytest.mark.slow
def test_report_names_fields_and_measures_errors():
  inner = optax.lion(1e-2)
  _, state = run(wrap(inner), tree())
  _, exact = run(inner, tree())
  report = state_report(state, reference=exact)
  assert set(report) == {"w", "e", "norm/scale"}
  assert report["w"]["encoded"] and not report["norm/scale"]["encoded"]
  assert 0 < report["w"]["0/mu"]["relative_error"] < 0.1
  assert report["norm/scale"]["0/mu"]["relative_error"] < 1e-6


def check_saving(solver, params):
  """Checks that a state after two steps is restored bit for bit."""
  _, state = run(solver, params, count=2)
  like = jax.eval_shape(solver.init, params)
  for back in (
    pickle.loads(pickle.dumps(jax.device_get(state))),
    from_integers(to_integers(state), like),
  ):
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert_same_bits(back, state)


# The wrappers in which optax tests contributed optimizers.
WRAPPERS = {
  "chain": lambda solver: optax.chain(optax.clip_by_global_norm(1.0), solver),
  "masked": lambda solver: optax.masked(
    solver, {"w": True, "norm": {"scale": False}, "e": True}
  ),
  "partition": lambda solver: optax.partition(
    {"ours": solver, "sgd": optax.sgd(1e-2)},
    {"w": "ours", "norm": {"scale": "sgd"}, "e": "ours"},
  ),
  "multi_steps": lambda solver: optax.MultiSteps(
    solver, every_k_schedule=2
  ).gradient_transformation(),
  "apply_if_finite": lambda solver: optax.apply_if_finite(solver, 3),
}
CASES = list(zip(SOLVERS, 2 * list(WRAPPERS), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name, wrapper", CASES)
def test_optimizer_works_in_a_wrapper_of_optax(name, wrapper):
  solver, params = WRAPPERS[wrapper](wrap(SOLVERS[name]())), tree()
  state = jax.eval_shape(solver.init, params)
  assert any(x.startswith("float8") for x in stored(state).values())
  # Codes, and fields that are not encoded, have the shapes of parameters.
  seen = []
  mapped = optax.tree.map_params(solver, lambda x: seen.append(x) or x, state)
  assert types(mapped) == types(state)
  shapes = {(8, 10), (16, 8), (6,)}
  if name == "adafactor":
    shapes.add((1,))  # Placeholders have this shape.
  assert seen and {x.shape for x in seen} <= shapes
  new, _ = run(solver, params)
  assert types(new) == types(params)
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(new))
  assert np.any(np.asarray(new["w"]) != np.asarray(params["w"]))
  check_saving(solver, params)


@pytest.mark.parametrize("name", quick(1, SOLVERS))
def test_types_of_updates_match_the_inner_optimizer(name):
  inner = SOLVERS[name]()
  for dtype in ("bfloat16", "float16", "float32"):
    params, grads = tree(dtype=dtype), tree(1, dtype)
    got, want = (
      jax.eval_shape(
        lambda p, g, tx=tx: tx.update(g, tx.init(p), p)[0], params, grads
      )
      for tx in (wrap(inner), inner)
    )
    if name == "adafactor":
      want = params  # Optax's updates are f32 even for 16-bit parameters.
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (got, want))
    assert shapes[0] == shapes[1]
    state = jax.eval_shape(wrap(inner).init, params)
    assert set(stored(state).values()) <= {"float8_e4m3fn", "float32"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lion", "muon"])
def test_sharded_step_matches_one_device_bit_for_bit(name):
  # Each device holds whole groups of 128 values.
  shapes = {"w": (8, 1024), "e": (64, 128)}
  specs = {"w": jax.P(None, "fsdp"), "e": jax.P("fsdp")}
  mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
  where = {k: NamedSharding(mesh, spec) for k, spec in specs.items()}

  def draw(seed, shardings=None):
    keys = jax.random.split(jax.random.key(seed), 2)
    pairs = zip(shapes.items(), keys, strict=True)
    out = {k: jax.random.normal(key, shape) for (k, shape), key in pairs}
    return out if shardings is None else jax.device_put(out, shardings)

  solver = encoded(SOLVERS[name](), codecs.log8(), quantize_mask=mask)
  abstract = abstract_state(solver.init, draw(0), where)
  shardings = jax.tree.map(lambda x: x.sharding, abstract)
  for keys, x in jax.tree_util.tree_flatten_with_path(abstract)[0]:
    if x.ndim == 2:
      assert x.sharding.is_equivalent_to(where[keys[-1].key], 2), keys

  def step(params, state, grads):
    updates, state = solver.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  init = jax.jit(solver.init, out_shardings=shardings)
  params = draw(0, where)
  sharded = jax.jit(step, out_shardings=(where, shardings))
  got = sharded(params, init(params), draw(1, where))
  params = draw(0)
  want = jax.jit(step)(params, jax.jit(solver.init)(params), draw(1))
  if name == "muon":
    # Its matmuls sum over devices in a different order, which changes the
    # parameters, but not the state.
    got, want = got[1], want[1]
  assert_same_bits(got, want)
  narrow = encoded(SOLVERS[name](), codecs.coat(256), quantize_mask=mask)
  with pytest.raises(ValueError, match="whole groups of 256 values.* 'w'"):
    abstract_state(narrow.init, draw(0), where)


@pytest.mark.slow
def test_examples_run():
  # `from coat_jax.optimizer import encoded` would import the function.
  encoded_module = importlib.import_module("coat_jax.optimizer.encoded")
  for module in (encoded_module, fields, conversion):
    assert not doctest.testmod(module).failed
