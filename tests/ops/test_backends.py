# SPDX-License-Identifier: Apache-2.0
"""Compares the numerical core on a GPU with the same code on the CPU.

  JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/ops/test_backends.py -s

Exact results must be bit-identical: random words, casts, power-of-two bounds,
maxima and scales. XLA's quotients, powers, logarithms and roots differ between
backends by up to 2 ulp, so values close to a rounding boundary may get the
neighbouring code. At most 1 group in 10^4 may get a different exponent k, and
in groups with equal k, at most 1 value in 10^5 may get a different code.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.codecs.fp8 import ScaledFP8
from coat_jax.codecs.integers import LogUniform
from coat_jax.numerics import formats, qtensor, stochastic
from tests import cases, oracles
from tests.codecs import oracles as codec_oracles

pytestmark = pytest.mark.gpu

SHAPE, GROUP_SIZE = (1024, 1024), 128
CODECS = [
  pytest.param(build, rounding, id=f"{name}-{rounding}")
  for name, build in codec_oracles.GROUP_CODECS.items()
  for rounding in ("nearest", "stochastic")
]


def on_both(f, *args):
  """Runs f, jitted, on the CPU and on the GPU; returns NumPy arrays."""
  results = []
  for backend in ("cpu", "gpu"):
    device = jax.devices(backend)[0]
    result = jax.jit(f)(*jax.device_put(args, device))
    assert {d for x in jax.tree.leaves(result) for d in x.devices()} == {device}
    results.append(jax.tree.map(np.asarray, result))
  return results


def assert_same_bits(cpu, gpu, what=""):
  for a, b in zip(jax.tree.leaves(cpu), jax.tree.leaves(gpu), strict=True):
    a, b = np.atleast_1d(a), np.atleast_1d(b)
    np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), what)


def realistic(codec):
  mu, nu = cases.moments(SHAPE)
  return nu if codec_oracles.is_unsigned(codec) else mu


def degenerate(codec):
  """Returns names and rows: four of each degenerate or nonfinite group."""
  groups = cases.finite_groups(300) | cases.nonfinite_groups(300)
  x = np.repeat(np.stack(list(groups.values())), 4, axis=0)
  names = np.repeat(list(groups), 4)
  return names, np.abs(x) if codec_oracles.is_unsigned(codec) else x


def test_random_words_and_their_uses_are_bit_identical():
  x = cases.moments(SHAPE)[0]

  def draw(step, x):
    words = stochastic.random_words(stochastic.leaf_key(1, step, 2), SHAPE)
    low, high = (
      stochastic.uniform(words),
      stochastic.uniform(stochastic.next_words(words)),
    )
    return words, low, high, stochastic.round_to_bfloat16(x, words)

  assert_same_bits(*on_both(draw, jnp.uint32(77), x))


@pytest.mark.parametrize("dtype", [formats.E4M3, formats.E5M2])
def test_casts_are_bit_identical(dtype):
  # Test every bfloat16 except NaN, and the neighbours of every midpoint.
  every = np.arange(2**16, dtype=np.uint32) << 16
  every = every.astype(np.uint32).view(np.float32)
  values = oracles.fp8_values(dtype)
  middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
  near = [np.nextafter(middle, np.float32(end)) for end in (0, np.inf)]
  x = np.concatenate([every[~np.isnan(every)], middle, *near])
  cpu, gpu = on_both(lambda x: formats.saturating_cast(x, dtype), x)
  # A backend may flush subnormals to zero before it reads the sign.
  normal = np.abs(x) >= oracles.SMALLEST_NORMAL
  assert_same_bits(cpu[normal], gpu[normal])
  assert_same_bits(
    *on_both(lambda q: q.astype(jnp.float32), cpu), "back to f32"
  )


@pytest.mark.parametrize("scale_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("group_size", [16, 128, None])
def test_gpu_quantizes_like_the_cpu(group_size, scale_dtype):
  def quantize(x):
    q = qtensor.quantize(x, group_size=group_size, scale_dtype=scale_dtype)
    return q, q.dequantize()

  names, awkward = degenerate(None)
  inputs = [("realistic", cases.activations(SHAPE))]
  if group_size is not None:  # A single scale for all groups would be NaN.
    # Leave out subnormals, which only some backends treat as zeros.
    inputs.append(("degenerate", awkward[names != "subnormal"]))
  for name, x in inputs:
    (cpu, _), (gpu, _) = on_both(quantize, x)
    # Scales are exact, because they are products with a constant, rounded up by
    # integer arithmetic. Compare them as f32, because NumPy treats two bfloat16
    # NaNs as different.
    scales = [np.asarray(q.scale, np.float32) for q in (cpu, gpu)]
    np.testing.assert_array_equal(*scales, name)
    apart = oracles.codes_apart(
      codec_oracles.bits(cpu.qvalue), codec_oracles.bits(gpu.qvalue)
    )
    print(
      f"quantize G={group_size} {jnp.dtype(scale_dtype).name} {name}: codes "
      f"equal {np.mean(apart == 0):.6%}, apart at most {np.max(apart)}"
    )
    finite = np.isfinite(x)
    assert np.mean(apart[finite] == 0) >= 0.99999
    assert np.max(apart[finite]) <= 1
    # Decoding multiplies once, so equal codes and scales give equal values.
    decoded = on_both(qtensor.QTensor.dequantize, cpu)
    nan = np.isnan(decoded[0])
    np.testing.assert_array_equal(nan, np.isnan(decoded[1]))
    flushed = np.abs(decoded[0]) < oracles.SMALLEST_NORMAL
    same = flushed & (np.abs(decoded[1]) < oracles.SMALLEST_NORMAL)
    same |= nan | (decoded[0] == decoded[1])
    assert np.all(same), name


def compare_codecs(codec, x, label):
  """Encodes on both backends, and prints what differs.

  Returns the CPU's result, a mask of finite groups (True where k or bounds are
  equal), and how many codes apart the values of such groups are.
  """
  words = stochastic.random_words(stochastic.leaf_key(0, 1, 0), x.shape)
  noise = stochastic.uniform(words) if codec.needs_noise else None
  cpu, gpu = on_both(codec.encode, x, noise)
  np.testing.assert_array_equal(cpu.amax, gpu.amax, label)
  groups = (*x.shape[:-1], -(-x.shape[-1] // codec.group_size))
  same = np.broadcast_to(cpu.range == gpu.range, groups)
  finite = np.broadcast_to(
    cpu.amax != 255 if cpu.amax.dtype == np.uint8 else np.isfinite(cpu.amax),
    groups,
  )
  counted = np.repeat(same & finite, codec.group_size, -1)[..., : x.shape[-1]]
  apart = codec_oracles.codes_apart(codec, cpu.codes, gpu.codes)[counted]
  print(
    f"{label}: k or bounds equal {np.mean(same[finite]):.6%} of "
    f"{np.sum(finite)} groups ({np.sum(~same & finite)} not); in those codes "
    f"equal {np.mean(apart == 0):.6%} of {apart.size} "
    f"({np.sum(apart != 0)} not), apart at most {np.max(apart)}"
  )
  return cpu, same[finite], apart


@pytest.mark.parametrize("build, rounding", CODECS)
def test_gpu_encodes_realistic_moments_like_the_cpu(build, rounding, request):
  codec = build(GROUP_SIZE, rounding)
  label = request.node.callspec.id
  _, same, apart = compare_codecs(codec, realistic(codec), label)
  assert np.mean(same) >= 0.9999
  assert np.mean(apart == 0) >= 0.99999 and np.max(apart) <= 1


@pytest.mark.parametrize("build, rounding", CODECS)
def test_gpu_encodes_degenerate_groups_like_the_cpu(build, rounding, request):
  codec = build(GROUP_SIZE, rounding)
  names, x = degenerate(codec)
  for name in np.unique(names):
    label = f"{request.node.callspec.id} {name}"
    cpu, same, apart = compare_codecs(codec, x[names == name], label)
    if not apart.size:  # All values are NaN.
      continue
    # All twelve groups of each kind must have the same k. Values at rounding
    # boundaries are common in constructed groups, so a few codes may be one
    # apart.
    assert np.all(same), label
    assert np.max(apart) <= 1 and np.mean(apart == 0) >= 0.99, label


@pytest.mark.parametrize("build, rounding", CODECS)
def test_gpu_decodes_like_the_cpu(build, rounding, request):
  codec = build(GROUP_SIZE, rounding)
  label = request.node.callspec.id
  for name, x in (
    ("realistic", realistic(codec)),
    ("degenerate", degenerate(codec)[1]),
  ):
    noise = np.full(x.shape, 0.5, np.float32) if codec.needs_noise else None
    encoded, _ = on_both(codec.encode, x, noise)
    cpu, gpu = on_both(codec.decode, encoded)
    np.testing.assert_array_equal(np.isnan(cpu), np.isnan(gpu), label)
    normal = np.abs(cpu) >= oracles.SMALLEST_NORMAL
    if isinstance(codec, ScaledFP8):
      # Decoding multiplies twice, so only subnormals may differ.
      lowest = oracles.QMAX[codec.dtype] * oracles.SMALLEST_NORMAL
      amax = np.repeat(encoded.amax, GROUP_SIZE, -1)[..., : x.shape[-1]]
      normal &= amax > lowest
      np.testing.assert_array_equal(cpu[normal], gpu[normal], label)
    # Roots and exponentials are off by up to 2 ulp on each backend. A root's
    # exponent, up to 250 octaves, is off by one ulp: 2^-23 * 250 < 2^-15.
    # Realistic groups span less than 32 octaves.
    tolerance = 2.0**-15 if name == "degenerate" else 2.0**-18
    if isinstance(codec, LogUniform):  # The argument of exp2 is small.
      tolerance = 2.0**-21
    error = np.abs(gpu[normal] / cpu[normal].astype(np.float64) - 1)
    print(
      f"{label} {name}: equal {np.mean(error == 0):.4%}, largest relative "
      f"difference {np.max(error):.3g}"
    )
    assert np.max(error) <= tolerance
