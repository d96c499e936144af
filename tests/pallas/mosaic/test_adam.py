# SPDX-License-Identifier: Apache-2.0
"""Compares Adam's kernel with its definition, interpreted and on a GPU.

The kernel uses logarithms where the definition divides and raises to powers, so
results differ by some ulp. A value close to a rounding boundary may get the
neighbouring code, and a group may get a different power k, which changes all of
its codes. So only codes of groups with the same k are compared. Each step
starts from the state of the definition, so that differences do not accumulate.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import codecs, ops
from coat_jax.codecs.group import Encoded
from coat_jax.numerics import stochastic
from coat_jax.numerics.stochastic import LeafPart
from coat_jax.optimizer import adam
from coat_jax.optimizer import step as steps
from coat_jax.pallas.mosaic import adam as kernel
from coat_jax.pallas.mosaic import leaf_step
from tests import cases
from tests.codecs import oracles as codec_oracles
from tests.matrices import quick

CODECS = {
  "coat": codecs.coat(),
  "coat_nearest": codecs.coat(rounding="nearest"),
  "coat_e5m2": codecs.coat(second="e5m2"),
  "coat_e5m2_nearest": codecs.coat(second="e5m2", rounding="nearest"),
  "coat_e8m0": codecs.coat_e8m0(),
  "coat_e8m0_nearest": codecs.coat_e8m0(rounding="nearest"),
  "log8": codecs.log8(),
  "fp8": codecs.fp8(),
  "fp8_nearest": codecs.fp8(rounding="nearest"),
}
# Stochastic codecs first: their kernels contain all code of the others.
STOCHASTIC_FIRST = sorted(CODECS, key=lambda name: "nearest" in name)
SHAPE = (4, 4, 256)  # 32 groups, two per row; rows along two axes.


@functools.partial(jax.jit, static_argnums=0)
def encoded(codec, mu, nu):
  return steps.encode(codec.groups, (mu, nu), LeafPart(jnp.uint32(3)))


def problem(codec, dtype, grad_dtype=None, shape=SHAPE, seed=0):
  """Makes p, g and encoded moments, as they are after some steps."""
  rng = np.random.default_rng(seed)
  mu, nu = cases.moments(shape, seed)
  g = mu * rng.normal(1, 1, size=shape)
  p = jnp.asarray(rng.normal(size=shape), dtype)
  g = jnp.asarray(g, dtype if grad_dtype is None else grad_dtype)
  return p, g, encoded(codec, mu, nu)


def numbers(step, *, eps_root=0.0, grad_scale=None, b2=0.999, **part):
  """Returns the last three arguments of `adamw_step`."""
  key = stochastic.leaf_key(0, step, 1)
  scalars = adam.adam_scalars(jnp.int32(step), 0.9, b2, 1e-8, eps_root)
  rest = jax.tree.map(jnp.float32, (1e-2, 0.1, grad_scale))
  return LeafPart(key, **part), scalars, adam.StepScalars(*rest)


@functools.partial(jax.jit, static_argnums=0)
def by_definition(codec, *args):
  return adam.adamw_step.definition(*args, groups=codec.groups)


def by_kernel(codec, *args, interpret=True):
  return kernel.adamw_step(*args, groups=codec.groups, interpret=interpret)


def differences(codec, want, got):
  """Compares encoded moments.

  Returns the number of groups in which k or a bound differs, the number of all
  groups, and how many codes apart the codes in the other groups are.
  """
  other, apart, total = 0, [], 0
  for group, a, b in zip(codec.groups, want, got, strict=True):
    assert [x.dtype for x in a] == [x.dtype for x in b]
    assert [x.shape for x in a] == [x.shape for x in b]
    count = a.codes.size // 128
    same = np.broadcast_to(np.ravel(a.range == b.range), count)
    if a.amax.dtype == jnp.uint8:
      same = same & np.ravel(a.amax == b.amax)
    else:
      np.testing.assert_allclose(a.amax, b.amax, rtol=2**-17)
    codes = codec_oracles.codes_apart(group, a.codes, b.codes).reshape(-1, 128)
    apart.append(codes[same].ravel())
    other, total = other + np.sum(~same), total + count
  return other, total, np.concatenate(apart)


def compare(codec, step, args, *, interpret, rtol=1e-6):
  """Runs a step of the kernel and of the definition, from the same state.

  Returns the definition's result, and what `differences` returns.
  """
  want = by_definition(codec, *args, *numbers(step))
  got = by_kernel(codec, *args, *numbers(step), interpret=interpret)
  assert got[0].dtype == args[0].dtype and got[0].shape == args[0].shape
  p, q = (np.asarray(x[0], np.float32) for x in (want, got))
  if args[0].dtype == jnp.bfloat16:
    # Rounding differs only if the noise is within about 2^-16 of the threshold.
    assert np.mean(p != q) <= 1e-3
    rtol = 2.0**-7
  # Allow an absolute error for parameters near zero, whose terms cancel.
  np.testing.assert_allclose(q, p, rtol=rtol, atol=rtol * 1e-2)
  return want, differences(codec, want[1], got[1])


@pytest.mark.parametrize("dtype", quick(1, [jnp.bfloat16, jnp.float32]))
def test_kernel_on_a_shard_uses_the_random_words_of_its_position(dtype):
  codec = CODECS["coat"]
  p, g, stored = problem(codec, dtype)
  part = dict(start=jnp.uint32([4, 8, 256]), whole=(8, 12, 1024))
  args = (p, g, stored, *numbers(1, **part))
  want = adam.adamw_step.definition(*args, groups=codec.groups)
  got = kernel.adamw_step(*args, groups=codec.groups, interpret=True)
  args = (p, g, stored, *numbers(1))
  _, _, apart = differences(codec, want[1], got[1])
  assert np.mean(apart != 0) <= 1e-3
  p, q = (np.asarray(x[0], np.float32) for x in (want, got))
  assert np.mean(p != q) <= (1e-3 if dtype == jnp.bfloat16 else 1)
  elsewhere = adam.adamw_step.definition(*args, groups=codec.groups)
  _, _, apart = differences(codec, elsewhere[1], got[1])
  assert np.mean(apart != 0) > 0.1


@pytest.mark.parametrize("dtype", quick(1, [jnp.float32, jnp.bfloat16]))
@pytest.mark.parametrize("name", quick(2, STOCHASTIC_FIRST))
def test_interpreted_kernel_matches_definition(name, dtype):
  codec = CODECS[name]
  p, g, stored = problem(codec, dtype)
  other, total, apart = 0, 0, []
  for step in (1, 2):
    (p, stored), found = compare(codec, step, (p, g, stored), interpret=True)
    other, total = other + found[0], total + found[1]
    apart.append(found[2])
  apart = np.concatenate(apart)
  assert other == 0 and total == 2 * 2 * 32
  assert np.mean(apart != 0) <= 1e-3 and np.max(apart) <= 1


@pytest.mark.parametrize("grad_dtype", [jnp.float32, jnp.bfloat16])
def test_interpreted_update_matches_definition(grad_dtype):
  codec = CODECS["coat"]
  _, g, stored = problem(codec, jnp.float32, grad_dtype)
  key, scalars, _ = numbers(3, eps_root=1e-10)
  args, groups = (g, stored, key, scalars), codec.groups
  want, stored = jax.jit(
    functools.partial(adam.adam_update.definition, groups=groups)
  )(*args)
  got, new = kernel.adam_update(*args, groups=groups, interpret=True)
  assert got.dtype == grad_dtype
  rtol = 1e-5 if grad_dtype == jnp.float32 else 2.0**-7
  np.testing.assert_allclose(
    np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=rtol
  )
  other, _, apart = differences(codec, stored, new)
  assert other == 0 and np.mean(apart != 0) <= 1e-3 and np.max(apart) <= 1


def test_kernel_scales_gradients_of_another_dtype():
  codec = CODECS["coat_nearest"]
  p, g, stored = problem(codec, jnp.float32, jnp.bfloat16)
  key, scalars, step = numbers(2, grad_scale=0.25)
  want = by_definition(codec, p, g, stored, key, scalars, step)
  got = by_kernel(codec, p, g, stored, key, scalars, step)
  np.testing.assert_allclose(got[0], want[0], rtol=1e-6, atol=1e-8)
  other, _, apart = differences(codec, want[1], got[1])
  assert other == 0 and np.mean(apart != 0) <= 1e-3


def awkward(codec):
  """Makes degenerate and nonfinite groups of gradients, and zero moments."""
  finite = cases.finite_groups(128) | {"plain": np.linspace(-1, 1, 128)}
  bad = cases.nonfinite_groups(128)
  groups = {k: np.asarray(v, np.float32) for k, v in (finite | bad).items()}
  while len(groups) % 8:
    groups[f"filler{len(groups)}"] = groups["plain"]
  g = jnp.asarray(np.stack(list(groups.values())))
  zero = jnp.zeros_like(g)
  names = np.array(list(groups))
  return names, np.isin(names, list(bad)), zero, g, encoded(codec, zero, zero)


def check_awkward(name, interpret):
  codec = CODECS[name]
  names, bad, p, g, stored = awkward(codec)
  step = numbers(1)
  want = by_definition(codec, p, g, stored, *step)
  got = by_kernel(codec, p, g, stored, *step, interpret=interpret)
  groups = codec.groups
  for group, a, b in zip(groups, want[1], got[1], strict=True):
    decoded = [np.asarray(group.decode(x)) for x in (a, b)]
    # Gradients whose squares would overflow are clipped, so moments are finite.
    for x in decoded:
      assert np.all(np.isnan(x[bad])) and np.all(np.isfinite(x[~bad]))
    nan = np.isnan(decoded[0])
    # If a group repeats a value at a rounding boundary, all of its codes may
    # differ by one.
    scale = np.nanmax(np.abs(decoded[0]), axis=1, keepdims=True, initial=0)
    error = np.abs(decoded[1] - decoded[0])[~nan]
    limit = (0.2 * np.abs(decoded[0]) + 1e-2 * scale)[~nan]
    assert np.all(error <= limit + 1e-37)
    zero = np.asarray(codec_oracles.bits(b.codes))[names == "zeros"]
    assert not np.any(zero)
  # NaN and infinities must not affect other groups.
  clean = jnp.where(bad[:, None], 1.0, g)
  again = by_kernel(codec, p, clean, stored, *step, interpret=interpret)
  for a, b in zip(got[1], again[1], strict=True):
    np.testing.assert_array_equal(
      codec_oracles.bits(a.codes)[~bad], codec_oracles.bits(b.codes)[~bad]
    )


@pytest.mark.parametrize(
  "name", quick(1, ["coat", "coat_e8m0", "log8", "fp8_nearest"])
)
def test_nonfinite_gradients_do_not_affect_other_groups(name):
  check_awkward(name, interpret=True)


def check_unbiased(name, draws, interpret):
  """Checks E[decode(encode(x))] = x, with the bounds of `tests.codecs`.

  With zero moments and all coefficients 1, a step only encodes g and g * g, f32
  values that are between codes.
  """
  codec = CODECS[name]
  shape = (8, 128)
  mu, nu = cases.moments(shape)
  zero = encoded(codec, np.zeros(shape, "f4"), np.zeros(shape, "f4"))
  one, none = jnp.float32(1), jnp.float32(0)
  # mu = 1 * 0 + 1 * g, nu = 1 * 0 + g * g.
  scalars = adam.AdamScalars(one, one, one, one, one, None, None, one)
  args = jnp.zeros(shape), jnp.asarray(mu), zero
  total = np.zeros((2, *shape))
  for step in range(draws):
    key = LeafPart(stochastic.leaf_key(0, step, 0))
    _, stored = by_kernel(
      codec, *args, key, scalars, adam.StepScalars(none, none, None),
      interpret=interpret,
    )  # fmt: skip
    total += np.stack([np.asarray(x) for x in decoded(codec, stored)])
  for group, mean, x in zip(
    codec.groups, total / draws, (mu, np.float32(mu) ** 2), strict=True
  ):
    gap = codec_oracles.gap(group, x)
    error = np.divide(mean - x, gap, out=np.zeros_like(mean), where=gap > 0)
    error *= np.sign(x)
    rest = 2**-17 + 2**-13
    assert np.max(np.abs(error)) < 6 * 0.5 / np.sqrt(draws) + rest
    assert abs(error.mean()) < 5 * 0.5 / np.sqrt(error.size * draws) + rest


@functools.partial(jax.jit, static_argnums=0)
def decoded(codec, stored):
  return steps.decode(codec.groups, stored)


@pytest.mark.parametrize("name", quick(1, ["coat", "log8"]))
def test_kernel_rounding_is_unbiased(monkeypatch, name):
  # The interpreter is slower if warpgroups take turns.
  monkeypatch.setattr(leaf_step, "_takes_turns", lambda *_: False)
  check_unbiased(name, 48, interpret=True)


def test_kernel_uses_the_random_words_of_row_and_column():
  # All values but each group's largest are halfway between two codes, so other
  # random words would round half of them differently.
  codec = CODECS["fp8"]
  x = jnp.tile(jnp.array([448.0, *[17.0] * 127]), (2, 5, 8, 3)) / 448
  zero = encoded(codec, jnp.zeros(x.shape), jnp.zeros(x.shape))
  one, none = jnp.float32(1), jnp.float32(0)
  scalars = adam.AdamScalars(one, one, one, one, one, None, None, one)
  part = LeafPart(jnp.uint32(5))
  rates = adam.StepScalars(none, none, None)
  _, stored = by_kernel(codec, x, x, zero, part, scalars, rates)
  noise = stochastic.uniform(part.words(x.shape))
  up = stored[0].codes.astype(jnp.float32) > 17
  mask = jnp.arange(x.shape[-1]) % 128 > 0
  np.testing.assert_array_equal(up[..., mask], (0.5 > noise)[..., mask])


REFUSED = [
  (codecs.coat(64), (8, 128), jnp.float32, "groups of 128, got 64"),
  (codecs.coat(), (8, 192), jnp.float32, r"multiple of 128, got shape \(8, 19"),
  (codecs.coat(), (3, 128), jnp.float32, "must be a multiple of 8, got 3"),
  (codecs.coat(), (8, 128), jnp.float16, "f32 or bf16, got {'float16'}"),
  (codecs.float32(), (8, 128), jnp.float32, "encoded in groups"),
]


@pytest.mark.parametrize("codec, shape, dtype, reason", REFUSED)
def test_kernel_refuses_unsupported_arguments(codec, shape, dtype, reason):
  zeros = jnp.zeros(shape)
  args = zeros.astype(dtype), zeros.astype(dtype), encoded(codec, zeros, zeros)
  args, groups = (*args, *numbers(1)), codec.groups
  with pytest.raises(NotImplementedError, match=f"adamw_step.*{reason}"):
    adam.adamw_step(*args, groups=groups, implementation="mosaic")
  assert re.search(reason, ops.explain(adam.adamw_step, *args, groups=groups))
  # Without a named implementation, the definition runs.
  adam.adamw_step(*args, groups=groups)


@pytest.mark.parametrize("dtype", quick(1, [jnp.bfloat16, jnp.float32]))
@pytest.mark.parametrize("name", quick(2, STOCHASTIC_FIRST))
def test_kernel_lowers_for_a_gpu(name, dtype):
  codec = CODECS[name]
  args = jax.eval_shape(lambda: (*problem(codec, dtype), *numbers(1)))
  step = functools.partial(
    adam.adamw_step, groups=codec.groups, implementation="mosaic"
  )
  text = jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",))
  assert text.as_text().count("mosaic_gpu_v2") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", CODECS)
def test_kernel_matches_definition_on_a_gpu(name, dtype):
  codec = CODECS[name]
  p, g, stored = problem(codec, dtype, shape=(512, 4096))
  for step in (1, 2, 3):
    (p, stored), (other, total, apart) = compare(
      codec, step, (p, g, stored), interpret=False
    )
    print(
      f"{name} {jnp.dtype(dtype).name} step {step}: k or bounds differ in "
      f"{other} of {total} groups, codes in {np.sum(apart != 0)} of "
      f"{apart.size}, at most {np.max(apart)}"
    )
    # If b1 * m + (1 - b1) * g cancels, a group's smallest magnitude is off by
    # more than an ulp. If this error crosses a power of two, log8 encodes the
    # whole group with a different bound.
    assert other <= 1e-3 * total
    assert np.mean(apart != 0) <= 1e-3
    assert np.mean(apart > 1) <= 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["coat", "coat_e8m0", "log8", "fp8_nearest"])
def test_nonfinite_gradients_do_not_affect_other_groups_on_a_gpu(name):
  check_awkward(name, interpret=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
  "name", ["coat", "coat_e5m2", "coat_e8m0", "log8", "fp8"]
)
def test_kernel_rounding_is_unbiased_on_a_gpu(name):
  check_unbiased(name, 1024, interpret=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["coat", "coat_nearest"])
def test_kernel_supports_leaves_of_more_than_2_31_values(name):
  # Only the last groups are nonzero, and a wrong offset would not update them.
  codec, rows = CODECS[name], (1 << 24) + 8
  zeros = jax.jit(lambda: jnp.zeros((rows, 128), jnp.bfloat16))()
  stored = jax.jit(
    lambda: jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      jax.eval_shape(
        lambda z: encoded(codec, z, z), jax.ShapeDtypeStruct((rows, 128), "f4")
      ),
    )
  )()
  stored = jax.tree.map(lambda x: x + 1 if x.dtype == jnp.uint8 else x, stored)
  g = jax.jit(lambda z: z.at[-8:].set(1.0))(zeros)
  p, new = adam.adamw_step(
    zeros, g, stored, *numbers(1), groups=codec.groups,
    implementation="mosaic",
  )  # fmt: skip
  assert not np.any(np.asarray(p[:-8:4096], np.float32))
  np.testing.assert_allclose(np.asarray(p[-8:], np.float32), -1e-2, rtol=1e-2)
  tail = Encoded(*(x[-8:] for x in new[0]))
  np.testing.assert_allclose(codec.mu.decode(tail), 0.1, rtol=1e-5)
