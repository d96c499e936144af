# SPDX-License-Identifier: Apache-2.0
"""Compiles attention and its gradients for an H200."""

import functools
import os
import re

import jax
import jax.numpy as jnp
import pytest

from coat_jax import ops
from coat_jax.ops import AttentionKind
from coat_jax.pallas.mosaic import attention
from tests.aot.compiling import (
  check_wgmma,
  compile_for_h200,
  custom_calls,
  instructions,
  ptxas_reports,
  temporary_bytes,
)

pytestmark = pytest.mark.aot

B, T, N, K, H, WINDOW = 1, 4096, 8, 4, 128, 1024


def compiled_attention(kind, segmented=False, heads=(B, T, N, K, H)):
  def f(q, k, v, dout, segments):
    residuals = ops.attention_fwd(q, k, v, segments, kind=kind)
    return ops.attention_bwd(dout, q, k, v, residuals, segments, kind=kind)

  b, t, *counts, h = heads
  q, kv = (jax.ShapeDtypeStruct((b, t, n, h), jnp.bfloat16) for n in counts)
  segments = jax.ShapeDtypeStruct((b, t), jnp.int32) if segmented else None
  return compile_for_h200(f, q, kv, kv, q, segments)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_each_pass_is_one_cudnn_call_with_the_window(window):
  compiled = compiled_attention(AttentionKind(window=window))
  calls = custom_calls(compiled)
  assert calls["__cudnn$fmhaSoftmax"] == 1
  assert calls["__cudnn$fmhaSoftmaxBackward"] == 1
  found = re.findall(
    r'"sliding_window_length": (\d+)', compiled.as_text() or ""
  )
  assert found == [str(window or 0)] * 2


SCORES = B * N * T * T * 4  # Size in bytes of all scores in f32.


@pytest.mark.parametrize(
  "kind, segmented, share",
  [
    # A chunk of 256 queries has a sixteenth of all scores. Up to three arrays
    # of this size are allocated at the same time.
    (AttentionKind(), True, 3 / 16),
    (AttentionKind(soft_cap=50.0), False, 3 / 16),
    # With a window, a chunk has scores for only 1280 keys.
    (AttentionKind(window=WINDOW, soft_cap=50.0), True, 3 / 16 * 1280 / T),
  ],
)
def test_xla_stores_scores_of_only_one_chunk(kind, segmented, share):
  # No kernel supports heads of size 100, so XLA runs.
  compiled = compiled_attention(kind, segmented, heads=(B, T, N, K, 100))
  assert not custom_calls(compiled)
  # Others are f32 accumulators of dk and dv, and chunks of q, dq and dout.
  others = (2 * 4 * K + 8 * N) * B * T * 100
  assert temporary_bytes(compiled) <= share * SCORES + others
  assert not [x for x in instructions(compiled) if f"{T},{T}]" in x.shape]


GEMMA, LLAMA = (16, 8, 256), (32, 32, 128)


@pytest.mark.parametrize(
  "heads, kind, segmented",
  [
    ((4, 2048, *GEMMA), AttentionKind(soft_cap=50.0), False),
    ((1, 8192, *GEMMA), AttentionKind(soft_cap=50.0, window=4096), False),
    ((1, 8192, *GEMMA), AttentionKind(soft_cap=50.0, window=4096), True),
    ((4, 2048, *LLAMA), AttentionKind(), True),
    ((4, 2048, *LLAMA), AttentionKind(soft_cap=50.0), False),
    ((4, 2048, 32, 8, 64), AttentionKind(False), True),
  ],
)
def test_attention_with_caps_or_segments_is_three_kernels(
  heads, kind, segmented
):
  compiled = compiled_attention(kind, segmented, heads)
  b, t, n, kv_heads, h = heads
  # The first computes the output, the second dq, and the third dk and dv.
  assert custom_calls(compiled) == {"mosaic_gpu_v2": 3}
  assert not [x for x in instructions(compiled) if f"{t},{t}]" in x.shape]
  # Temporary memory holds the output and four numbers per query and head: lse,
  # lse in base 2, delta, and an intermediate value.
  rows = b * t * n
  assert temporary_bytes(compiled) <= 2 * rows * h + 4 * 4 * rows + 2**20


def run_kernel(kind, name, q, k, v, dout, lse, segments):
  """Returns the result of one kernel; XLA removes the other kernels."""
  if name == "fwd":
    return attention.attention_fwd(q, k, v, segments, kind=kind)
  residuals = ops.AttentionResiduals(q, lse)
  args = dout, q, k, v, residuals, segments
  dq, *dkv = attention.attention_bwd(*args, kind=kind)
  return dq if name == "dq" else dkv


# Kernels mask tiles at both edges of a window; with segments, they mask every
# tile. With a cap of 50, softmax subtracts no maximum; with 80, it does.
KERNELS = [
  (head_dim, kind, segmented, name)
  for head_dim in (64, 72, 128, 256)
  for kind, segmented in (
    (AttentionKind(window=1000, soft_cap=50.0), False),
    (AttentionKind(window=1000, soft_cap=80.0), True),
  )
  for name in ("fwd", "dq", "dkv")
]


def compile_all(folder: str) -> None:
  """Compiles all of KERNELS; must run in a new process."""
  # The length, 2056, is not a multiple of the tile size.
  b, t, n, kv_heads = 2, 2056, 8, 4
  for i, (h, kind, segmented, name) in enumerate(KERNELS):
    q, kv = (
      jax.ShapeDtypeStruct((b, t, heads, h), jnp.bfloat16)
      for heads in (n, kv_heads)
    )
    lse = jax.ShapeDtypeStruct((b, t, n), jnp.float32)
    segments = jax.ShapeDtypeStruct((b, t), jnp.int32) if segmented else None
    os.environ["MOSAIC_GPU_DUMP_TO"] = f"{folder}/{i}-{name}-{h}"
    os.mkdir(os.environ["MOSAIC_GPU_DUMP_TO"])
    f = functools.partial(run_kernel, kind, name)
    compile_for_h200(f, q, kv, kv, q, lse, segments)


def test_kernels_use_wgmma_and_spill_no_registers(tmp_path):
  folders = ptxas_reports(__name__, tmp_path)
  assert len(folders) == len(KERNELS)
  for folder in folders:
    # Matmuls compute scores for 64 or 128 keys, or h columns of a result.
    name, h = folder.name.split("-")[1:]
    step = 128 if name == "fwd" and h != "256" else 64
    check_wgmma(folder, f"m64n{step}k16")
    padded = int(h) + -int(h) % 16
    check_wgmma(folder, f"m64n{padded}k16")
