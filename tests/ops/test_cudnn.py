# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of our cuDNN calls in the program that JAX lowers.

The arguments must match those of `jax.nn.dot_product_attention`, which calls
cuDNN too. Its windows are (left, right), without the query's own position.
"""

import functools
import re
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import pytest

from coat_jax import ops
from coat_jax.ops import AttentionKind, cudnn
from tests.comparing import assert_close, jit
from tests.matrices import quick
from tests.ops.test_dispatch import attention_arrays
from tests.pallas.kernels import lowered_for_h200, refused

WINDOWS = [AttentionKind(window=window) for window in (7, 1, 31)]
KINDS = [
  AttentionKind(),
  AttentionKind(window=32),
  AttentionKind(window=100, scale=0.25),
  AttentionKind(causal=False, scale=0.25),
  *WINDOWS,
]


@pytest.fixture(autouse=True)
def has_cudnn(monkeypatch):
  """Makes JAX assume that cuDNN is installed; lowering does not need it."""
  monkeypatch.setattr(cudnn.fmha, "check_cudnn_version", lambda: 91000)


def forward_and_backward(kind):
  def f(q, k, v, dout):
    residuals = ops.attention_fwd(q, k, v, kind=kind)
    return residuals, ops.attention_bwd(dout, q, k, v, residuals, kind=kind)

  return f


def forward_and_backward_of_jax(
  kind, implementation: Literal["cudnn", "xla"] = "cudnn"
):
  attend: Callable = functools.partial(
    jax.nn.dot_product_attention,
    is_causal=kind.causal,
    local_window_size=None if kind.window is None else (kind.window - 1, 0),
    scale=kind.scale,
    implementation=implementation,
  )

  def f(q, k, v, dout):
    out, vjp = jax.vjp(attend, q, k, v)
    return out, vjp(dout)

  return f


def settings(text):
  """Returns the name and settings of each cuDNN call."""
  calls, setting = [], r"(fmha_scale|mask_type|sliding\w+).22: ([^,]+),"
  for line in text.splitlines():
    if name := re.search(r"@(__cudnn\$\w+)", line):
      found = re.findall(setting, line)
      assert len(found) == 3, line
      calls.append((name[1], dict(found)))
  return calls


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_cudnn_gets_the_settings_that_jax_passes(kind):
  arrays = attention_arrays()
  arrays = (*arrays, arrays[0])
  actual = settings(lowered_for_h200(forward_and_backward(kind), *arrays))
  names = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
  assert [name for name, _ in actual] == names
  want = settings(lowered_for_h200(forward_and_backward_of_jax(kind), *arrays))
  if kind.window is not None and kind.window >= 32:  # It sees all keys.
    for _, found in want:
      found["sliding_window_length"] = "0"
  assert actual == want


@pytest.mark.parametrize("kind", quick(1, WINDOWS), ids=str)
def test_windowed_attention_matches_jax(kind):
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = [x.shape for x in attention_arrays(h=8)]
  arrays = map(jax.random.normal, keys, [*shapes, shapes[0]])
  q, k, v, dout = arrays
  residuals, gradients = jit(forward_and_backward(kind))(q, k, v, dout)
  want = jit(forward_and_backward_of_jax(kind, "xla"))(q, k, v, dout)
  assert_close(residuals.out, want[0])
  # With a window of one key, dq and dk are only rounding errors, so compare all
  # gradients together.
  assert_close(
    jnp.hstack(list(map(jnp.ravel, gradients))),
    jnp.hstack(list(map(jnp.ravel, want[1]))),
  )


@pytest.mark.parametrize(
  "kind, segmented, reason",
  [
    (AttentionKind(), False, None),
    (AttentionKind(window=7, scale=0.25), False, None),
    (AttentionKind(soft_cap=50.0), False, "cannot cap scores.*soft_cap=50.0"),
    (AttentionKind(), True, "fixed number of segments, got an id for each"),
  ],
)
def test_explain_says_whether_cudnn_runs(kind, segmented, reason):
  q, k, v = attention_arrays()
  segments = jnp.zeros(q.shape[:2], jnp.int32) if segmented else None
  residuals = ops.AttentionResiduals(q, jnp.zeros(q.shape[:3]))
  forward = ops.attention_fwd, q, k, v, segments
  backward = ops.attention_bwd, q, q, k, v, residuals, segments
  for op, *args in (forward, backward):
    said = ops.explain(op, *args, kind=kind)
    runs = "cudnn" if reason is None else "mosaic"
    assert said == f"{op.name}: {runs} on a GPU, xla elsewhere"
    if reason is not None:
      with refused(f"{op.name}: .*{reason}"):
        op(*args, kind=kind, implementation="cudnn")


@pytest.mark.parametrize("segmented", [True, False])
def test_cudnn_does_not_run_unsupported_attention(segmented):
  kind = AttentionKind(window=7, soft_cap=None if segmented else 50.0)
  q, k, v = attention_arrays()
  segments = jnp.zeros(q.shape[:2], jnp.int32) if segmented else None
  f = lambda *arrays: ops.attention_fwd(*arrays, kind=kind)  # noqa: E731
  text = lowered_for_h200(f, q, k, v, segments)
  assert "cudnn" not in text and "mosaic_gpu" in text


def test_keys_of_another_dtype_run_in_xla():
  q, k, v = attention_arrays()
  k, v = k.astype(jnp.float32), v.astype(jnp.float32)
  f = lambda *arrays: ops.attention_fwd(*arrays, kind=AttentionKind())  # noqa: E731
  text = lowered_for_h200(f, q, k, v)
  assert "cudnn" not in text and "dot_general" in text
