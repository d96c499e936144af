# SPDX-License-Identifier: Apache-2.0
"""Tests a user's own codec (`own_codec`)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import optimizer as optimizer_benchmark
from coat_jax import coat_adamw, codecs, ops
from coat_jax.codecs import registry
from coat_jax.codecs.fp8 import ExpandedFP8
from coat_jax.codecs.group import Encoded
from coat_jax.numerics.stochastic import LeafPart
from coat_jax.optimizer import adam, fused_coat_adamw
from coat_jax.optimizer.state import stored_leaves
from coat_jax.pallas.mosaic import adam as kernel
from coat_jax.pallas.mosaic import moment_codecs, registers
from studies import accuracy
from tests.codecs import own_codec
from tests.comparing import assert_same_bits
from tests.pallas.kernels import needs_interpreter

NAME = "tests.codecs.own_codec:make"


def problem():
  """Returns a least-squares problem: initial parameters and a loss function."""
  x = jax.random.normal(jax.random.key(0), (128, 64))
  y = x @ jax.random.normal(jax.random.key(1), (64, 128))
  return {"w": jnp.zeros((64, 128))}, lambda p: jnp.mean((x @ p["w"] - y) ** 2)


def train(loss, params, state, step, count=200):
  def body(carry, _):
    params, state = carry
    return step(params, state, jax.grad(loss)(params)), None

  run = jax.jit(lambda x: jax.lax.scan(body, x, length=count)[0])
  return run((params, state))


@pytest.mark.parametrize("kind", ["chained", "fused"])
def test_own_codec_trains(kind):
  params, loss = problem()
  options = dict(learning_rate=3e-2, weight_decay=0.0)
  reference = optax.adamw(**options)
  codec = codecs.build(NAME)
  chain, fused = (
    make(**options, codec=codec) for make in (coat_adamw, fused_coat_adamw)
  )

  def by(solver):
    def step(params, state, grads):
      updates, state = solver.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    return step

  want, _ = train(loss, params, reference.init(params), by(reference))
  if kind == "chained":
    state = chain.init(params)
    got, (state, *_) = train(loss, params, state, by(chain))
  else:
    got, state = train(
      loss, params, fused.init(params), lambda p, s, g: fused.apply(g, s, p)
    )
  assert state.mu.codes["w"].dtype == jnp.int8
  assert int(state.count) == 200
  # The losses differ by at most 5 % of Adam's reduction of the loss.
  start = loss(params)
  assert abs(loss(got) - loss(want)) < 0.05 * (start - loss(want))


def test_own_codec_appears_in_benchmarks(monkeypatch):
  named = {"fourth_roots"}
  assert {label for label, _ in optimizer_benchmark.cases([NAME])} == named
  assert {case.codec.name for case in accuracy.cases([NAME])} == named
  monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
  codecs.register(own_codec.make)
  assert "make" in codecs.names()
  assert named < {label for label, _ in optimizer_benchmark.cases()}
  assert named < {case.codec.name for case in accuracy.cases()}


@dataclasses.dataclass(frozen=True)
class Subclass(ExpandedFP8):
  """A codec that no kernel supports, although kernels support its base."""


def step_arguments(codec):
  p = jnp.full((8, 128), 0.5)
  state = coat_adamw(1e-3, codec=codec, quantize_mask=lambda *_: True).init(p)
  [(stored, _)] = stored_leaves(state[0])
  scalars = adam.adam_scalars(jnp.int32(1), 0.9, 0.99, 1e-8, 0.0)
  rest = adam.StepScalars(jnp.float32(0.1), jnp.float32(0), None)
  g = jax.random.normal(jax.random.key(0), p.shape)
  return p, g, stored, LeafPart(jnp.uint32(5)), scalars, rest


@pytest.mark.parametrize(
  "codec, name",
  [
    (own_codec.make(), "FourthRoots"),
    (
      codecs.MomentCodec(
        name="sub",
        mu=ExpandedFP8(128, "nearest"),
        nu=Subclass(128, "nearest"),
      ),
      "Subclass",
    ),
  ],
)
def test_kernel_refuses_an_unregistered_codec(codec, name):
  reason = f"adamw_step: the GPU kernel does not support the codec {name}"
  args = step_arguments(codec)
  with pytest.raises(NotImplementedError, match=reason):
    adam.adamw_step(*args, groups=codec.groups, implementation="mosaic")
  said = ops.explain(adam.adamw_step, *args, groups=codec.groups)
  runs = "mosaic_tpu on a TPU, xla elsewhere"
  assert said == f"adamw_step: {runs} ({reason})"
  optimizer = fused_coat_adamw(1e-3, codec=codec)
  params = {"w": jnp.ones((64, 128))}
  assert reason in optimizer.explain(params)["w"]
  with pytest.raises(NotImplementedError, match=reason):
    named = fused_coat_adamw(1e-3, codec=codec, implementation="mosaic")
    named.apply(params, named.init(params), params)
  # Without a named implementation, the definition runs.
  got = adam.adamw_step(*args, groups=codec.groups)
  want = adam.adamw_step.definition(*args, groups=codec.groups)
  assert_same_bits(got, want)


def test_own_codec_runs_in_the_kernel_for_tpus():
  """The TPU kernel calls the codec itself, so it need not be registered."""
  codec = own_codec.make()
  args, groups = step_arguments(codec), codec.groups
  kernel = adam.adamw_step.kernel("mosaic_tpu")
  got = jax.jit(lambda *a: kernel(*a, groups=groups, interpret=True))(*args)
  definition = adam.adamw_step.definition
  want = jax.jit(lambda *a: definition(*a, groups=groups))(*args)
  jax.tree.map(np.testing.assert_array_equal, got, want)


@dataclasses.dataclass(frozen=True)
class OnRegisters:
  """Implements `FourthRoots` for the kernel, with rounding to nearest."""

  codec: own_codec.FourthRoots

  def decode(self, encoded, signed, on):
    del signed, on
    root = encoded.codes.astype(jnp.float32) * (1 / 127)
    amax = registers.spread(encoded.amax)
    return moment_codecs.Decoded(moment_codecs.with_sign(root**4, root) * amax)

  def encode(self, x, noise, signed, on):
    del noise
    amax, _ = moment_codecs.extremes(x, signed)
    magnitude = jnp.abs(x) if signed else x
    scale = jnp.minimum(on.reciprocal(amax), 2.0**127)
    root = on.sqrt(on.sqrt(magnitude * registers.spread(scale)))
    _, codes = on.round(root, jnp.float32(127))
    codes = jnp.where(x < 0, -codes, codes) if signed else codes
    return Encoded(codes.astype(jnp.int8), amax, None)


@needs_interpreter
def test_own_codec_can_be_added_to_the_kernel(monkeypatch):
  table = dict(moment_codecs._REGISTER_CODECS)
  monkeypatch.setattr(moment_codecs, "_REGISTER_CODECS", table)
  moment_codecs.register(own_codec.FourthRoots)(OnRegisters)
  codec = own_codec.make(rounding="nearest")
  args, groups = step_arguments(codec), codec.groups
  said = ops.explain(adam.adamw_step, *args, groups=groups)
  assert (
    said == "adamw_step: mosaic on a GPU, mosaic_tpu on a TPU, xla elsewhere"
  )
  got = kernel.adamw_step(*args, groups=groups, interpret=True)
  want = adam.adamw_step.definition(*args, groups=groups)
  np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
  for a, b in zip(got[1], want[1], strict=True):
    np.testing.assert_allclose(a.amax, b.amax, rtol=2**-17)
    apart = np.abs(np.asarray(a.codes, int) - np.asarray(b.codes, int))
    # The kernel computes roots with another instruction, so a value close to a
    # rounding boundary may get the neighbouring code.
    assert np.mean(apart != 0) <= 1e-2 and np.max(apart) <= 1
    assert np.ptp(np.asarray(a.codes, int)) > 50
