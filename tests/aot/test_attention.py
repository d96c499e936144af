# SPDX-License-Identifier: Apache-2.0
"""What the compiler for an H200 makes of attention and its gradients."""

import re

import jax
import jax.numpy as jnp
import pytest

from coat_jax import ops
from coat_jax.ops import AttentionKind
from tests.aot.compiling import (
  compile_for_h200,
  custom_calls,
  instructions,
  temporary_bytes,
)

pytestmark = pytest.mark.aot

B, T, N, K, H, WINDOW = 1, 4096, 8, 4, 128, 1024


def compiled_attention(kind, segmented=False):
  def f(q, k, v, dout, segments):
    residuals = ops.attention_fwd(q, k, v, segments, kind=kind)
    return ops.attention_bwd(dout, q, k, v, residuals, segments, kind=kind)

  q, kv = (jax.ShapeDtypeStruct((B, T, n, H), jnp.bfloat16) for n in (N, K))
  segments = jax.ShapeDtypeStruct((B, T), jnp.int32) if segmented else None
  return compile_for_h200(f, q, kv, kv, q, segments)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_window_is_left_to_cudnn(window):
  compiled = compiled_attention(AttentionKind(window=window))
  calls = custom_calls(compiled)
  assert calls["__cudnn$fmhaSoftmax"] == 1
  assert calls["__cudnn$fmhaSoftmaxBackward"] == 1
  found = re.findall(
    r'"sliding_window_length": (\d+)', compiled.as_text() or ""
  )
  assert found == [str(window or 0)] * 2


SCORES = B * N * T * T * 4  # All of them, f32.


@pytest.mark.parametrize(
  "kind, segmented, share",
  [
    # A chunk of 256 queries has a sixteenth of all scores, and there are up to
    # three arrays of them at a time.
    (AttentionKind(), True, 3 / 16),
    (AttentionKind(soft_cap=50.0), False, 3 / 16),
    # With a window they are of 1280 keys.
    (AttentionKind(window=WINDOW, soft_cap=50.0), True, 3 / 16 * 1280 / T),
  ],
)
def test_xla_holds_scores_of_one_chunk(kind, segmented, share):
  compiled = compiled_attention(kind, segmented)
  assert not custom_calls(compiled)
  # Beside the scores: sums of dk and dv, f32, and chunks of q, dq and dout.
  others = (2 * 4 * K + 8 * N) * B * T * H
  assert temporary_bytes(compiled) <= share * SCORES + others
  assert not [x for x in instructions(compiled) if f"{T},{T}]" in x.shape]
