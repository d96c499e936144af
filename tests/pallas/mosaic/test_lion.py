# SPDX-License-Identifier: Apache-2.0
"""Compares Lion's kernel with its definition, interpreted and on a GPU.

`test_adam` explains which codes may differ. In addition, the update may have
the opposite sign if the weighted sum of gradient and moment is nearly zero.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import codecs, ops
from coat_jax.numerics import stochastic
from coat_jax.numerics.stochastic import LeafPart
from coat_jax.optimizer import lion, weights
from coat_jax.optimizer import step as steps
from coat_jax.optimizer.step import StepScalars
from coat_jax.pallas.mosaic import lion as kernel
from tests import cases
from tests.matrices import quick
from tests.pallas.mosaic.test_adam import differences

CODECS = {
  "coat": codecs.coat(),
  "log8": codecs.log8(),
  "fp8_nearest": codecs.fp8(rounding="nearest"),
}
B1, B2, RATE, DECAY = 0.9, 0.99, 1e-2, 0.1
KINDS = ["float32", "split", "bfloat16"]
SHAPE = (4, 4, 256)  # 32 groups, two per row; rows along two axes.


class Mu:
  """A codec of one moment, for `test_adam.differences`."""

  def __init__(self, codec):
    self.groups = codec.groups[:1]


def problem(codec, kind, shape=SHAPE):
  """Makes p, g and the encoded moment after some steps; group 3 is zero."""
  rng = np.random.default_rng(0)
  mu, _ = cases.moments(shape, 0)
  mu = np.array(mu).reshape(-1, 128)
  g = mu * rng.normal(1, 1, size=mu.shape)
  mu[3] = g[3] = 0
  mu, g = (jnp.asarray(x.reshape(shape), jnp.float32) for x in (mu, g))
  p = jnp.asarray(rng.normal(size=shape), jnp.float32)
  if kind == "split":
    p = jax.jit(weights.split)(p)
  elif kind == "bfloat16":
    p, g = p.astype(kind), g.astype(kind)
  encode = functools.partial(steps.encode, Mu(codec).groups)
  return p, g, jax.jit(encode)((mu,), LeafPart(jnp.uint32(3)))


def numbers(step, grad_scale=0.5, **part):
  key = stochastic.leaf_key(0, step, 1)
  rest = jax.tree.map(jnp.float32, (RATE, DECAY, grad_scale))
  return LeafPart(key, **part), lion.lion_scalars(B1, B2), StepScalars(*rest)


def terms(codec, p, g, stored):
  """Returns the old parameter, and the sum whose sign is the update.

  The third result is the same sum with the magnitude of each term.
  """
  [mu] = (np.asarray(x, np.float64) for x in steps.decode(codec, stored))
  g = 0.5 * np.asarray(g, np.float64)
  size = B1 * np.abs(mu) + (1 - B1) * np.abs(g)
  old = np.asarray(weights.in_f32(p), np.float64)
  return old, B1 * mu + (1 - B1) * g, size


def check(codec, args, want, got):
  """Compares a step of the kernel with a step of the definition."""
  groups = Mu(codec).groups
  old, mix, size = terms(groups, *args)
  p, q = (np.asarray(weights.in_f32(x[0]), np.float64) for x in (want, got))
  # Decoded moments differ by a few ulps, so the signs of small sums may differ.
  undecided = (np.abs(mix) < 2**-16 * size) & (size > 0)
  assert np.mean(undecided) < 1e-3
  # Stochastic rounding to 24 bits changes a weight by up to 2^-15 of its value,
  # and to bf16 by up to 2^-7.
  exact = old - RATE * (np.sign(mix) + DECAY * old)
  kind = jax.tree.leaves(args[0])[0].dtype
  unit = 2**-22 if kind == jnp.float32 else 2**-15
  if kind == jnp.bfloat16 and len(jax.tree.leaves(args[0])) == 1:
    unit = 2**-7
  for x in (p, q):
    error = np.abs(x - exact)[~undecided]
    limit = unit * (np.abs(exact) + np.abs(old) + RATE)[~undecided]
    assert np.all(error <= limit)
  # Stochastic rounding differs only if the noise is close to the threshold.
  if kind == jnp.bfloat16:
    assert np.mean((p != q)[~undecided]) < 0.02
  other, total, apart = differences(Mu(codec), want[1], got[1])
  assert other <= 1e-3 * total
  assert np.mean(apart != 0) <= 1e-3 and np.max(apart) <= 1


def by_definition(codec, *args, **options):
  step = functools.partial(
    lion.lion_step.definition, groups=codec.groups[:1], **options
  )
  return jax.jit(step)(*args)


def by_kernel(codec, *args, interpret=True, **options):
  return kernel.lion_step(
    *args, groups=codec.groups[:1], interpret=interpret, **options
  )


@pytest.mark.parametrize(
  "name, kind",
  quick(
    1,
    [
      ("coat", "bfloat16"),
      ("coat", "split"),
      ("log8", "float32"),
      ("fp8_nearest", "split"),
    ],
  ),
)
def test_interpreted_kernel_matches_definition_on_a_shard(name, kind):
  codec = CODECS[name]
  args = problem(codec, kind)
  part = dict(start=jnp.uint32([4, 8, 256]), whole=(8, 12, 1024))
  want = by_definition(codec, *args, *numbers(1, **part))
  got = by_kernel(codec, *args, *numbers(1, **part))
  check(codec, args, want, got)
  zero = np.asarray(got[1][0].codes).reshape(-1, 128)[3]
  assert not np.any(zero.view(np.uint8))


@pytest.mark.slow
def test_one_layer_is_updated_and_nan_stays_in_its_group():
  codec = CODECS["coat"]
  p, g, stored = problem(codec, "float32", (3, 8, 128))
  bad = [[1, 2], [1, 5]]
  g = g.at[1, 2, 7].set(jnp.inf).at[1, 5, 7].set(jnp.nan)
  layer = numbers(2, grad_scale=None, layer=jnp.int32(1))
  q, new = by_kernel(codec, p, g[1:2], stored, *layer)
  step = numbers(2, grad_scale=None)
  whole, all_new = by_kernel(codec, p, g, stored, *step)
  found = (q, *new[0]), (whole, *all_new[0]), (p, *stored[0])
  for x, y, old in zip(*found, strict=True):
    want = np.array(old)
    want[1] = np.asarray(y)[1]
    assert np.asarray(x).tobytes() == want.tobytes()
  # The sign of an infinite gradient is the update; NaN has no sign.
  assert np.isfinite(q[1, 2, 7]) and np.isnan(q[1, 5, 7])
  assert np.sum(~np.isfinite(q)) == 1
  decoded = steps.decode(codec.groups[:1], new)[0]
  spoilt = ~np.all(np.isfinite(decoded), axis=-1)
  assert bad == np.argwhere(spoilt).tolist()


@pytest.mark.parametrize(
  "name, kind",
  quick(1, [("coat", "bfloat16"), ("coat", "split"), ("log8", "float32")]),
)
def test_kernel_lowers_for_a_gpu(name, kind):
  codec = CODECS[name]
  args = jax.eval_shape(lambda: (*problem(codec, kind), *numbers(1)))
  options = dict(groups=codec.groups[:1])
  step = functools.partial(lion.lion_step, **options, implementation="mosaic")
  text = jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",))
  assert text.as_text().count("mosaic_gpu_v2") == 1
  said = ops.explain(lion.lion_step, *args, **options)
  assert said == (
    "lion_step: mosaic on a GPU, mosaic_tpu on a TPU, xla elsewhere"
  )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CODECS)
def test_kernel_matches_definition_on_a_gpu(name, kind):
  codec = CODECS[name]
  args = problem(codec, kind, (512, 4096))
  want = by_definition(codec, *args, *numbers(1))
  got = by_kernel(codec, *args, *numbers(1), interpret=False)
  check(codec, args, want, got)
