# SPDX-License-Identifier: Apache-2.0
"""Checks what `ops.explain` says for GPUs other than Hopper.

Nothing is compiled; tests/aot/test_other_gpus.py compiles for these GPUs.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from coat_jax import codecs, ops
from coat_jax.layers import rule
from coat_jax.ops import AttentionKind, capability
from coat_jax.optimizer.fused import fused_coat_adamw

A100, L4 = "NVIDIA A100-SXM4-80GB", "NVIDIA L4"
H200, B200 = "NVIDIA H200", "NVIDIA B200"
RTX = "NVIDIA RTX PRO 6000 Blackwell"
X = jnp.ones((32, 128))


def on(kind: str):
  """Returns a context in which JAX traces for a GPU of this kind."""
  device = AbstractDevice(kind, 100, "cuda")
  return jax.sharding.use_abstract_mesh(
    AbstractMesh((), (), abstract_device=device)
  )


def explain(op, *args, **how) -> str:
  return ops.explain(op, *args, **how).removeprefix(f"{op.name}: ")


@pytest.mark.parametrize(
  "kind, found",
  [
    (A100, 8.0),
    (L4, 8.9),
    ("NVIDIA L40S", 8.9),
    ("NVIDIA GeForce RTX 4090", 8.9),
    ("NVIDIA RTX 6000 Ada Generation", 8.9),
    (H200, 9.0),
    (B200, 10.0),
    ("NVIDIA GeForce RTX 5090", 12.0),
    ("NVIDIA H100 80GB HBM3", 9.0),
    ("NVIDIA A10G", 8.6),
    ("NVIDIA RTX A6000", 8.6),
    ("NVIDIA GB300", 10.3),
    (RTX, 12.0),
    ("cpu", None),
  ],
)
def test_capability_follows_from_the_name_of_an_abstract_gpu(kind, found):
  with on(kind):
    assert capability.capability() == found


@pytest.mark.parametrize(
  "text, found",
  [("8.6", 8.6), ("9.0", 9.0), ("12.1", 12.1), ("gfx942", None)],
)
def test_capability_of_the_local_gpu_is_the_default(monkeypatch, text, found):
  class Device:
    compute_capability = text

  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
  assert capability.capability() == found
  with on(A100):
    assert capability.capability() == 8.0


def test_explain_warns_about_untested_gpus(monkeypatch):
  groups = dict(groups=ops.Groups(16))
  runs = "mosaic on a GPU, xla elsewhere"
  with on(H200):
    assert explain(ops.quantize_groups, X, **groups) == runs
  for kind, found in ((L4, 8.9), (B200, 10.0), (RTX, 12.0)):
    with on(kind):
      tried = f" (compiled for compute capability {found}, never run there)"
      assert explain(ops.quantize_groups, X, **groups) == runs + tried
  monkeypatch.setattr(capability, "capability", lambda: 10.3)
  tried = " (neither compiled for compute capability 10.3 nor run there)"
  assert explain(ops.quantize_groups, X, **groups) == runs + tried
  monkeypatch.setattr(capability, "capability", lambda: 7.5)
  said = explain(ops.quantize_groups, X, **groups)
  assert "a kernel needs compute capability 8.0 or newer, got 7.5" in said


def test_gpu_without_fp8_runs_only_kernels_without_fp8():
  x, w = ops.quantize_tensor(X), ops.quantize_tensor(X.T, layout="columns")
  too_old = "needs compute capability 8.9 or newer, got 8.0"
  with on(A100):
    groups = explain(ops.quantize_groups, X, groups=ops.Groups(16))
    for said, what in (
      (groups, "a Mosaic kernel that converts to FP8"),
      (explain(ops.quantize_rows, X, scale=jnp.ones(())), "a cast to E4M3"),
      (explain(ops.linear_fwd, x, w), "an FP8 matmul of cuBLASLt"),
    ):
      assert said.startswith("xla everywhere")
      assert what in said and too_old in said
    q = jnp.zeros((1, 128, 2, 64), jnp.bfloat16)
    said = explain(ops.attention_fwd, q, q, q, kind=AttentionKind())
    assert said.startswith("cudnn on a GPU")
    q = jnp.zeros((1, 128, 2, 256), jnp.bfloat16)
    said = explain(ops.attention_fwd, q, q, q, kind=AttentionKind())
    assert said.startswith("xla everywhere") and "up to 128" in said


@pytest.mark.parametrize("soft_cap, is_packed", [(50.0, False), (None, True)])
def test_caps_and_segments_run_on_mosaic_only_on_hopper(soft_cap, is_packed):
  q = jnp.zeros((1, 128, 2, 256), jnp.bfloat16)
  segments = jnp.zeros((1, 128), jnp.int32) if is_packed else None
  residuals = ops.AttentionResiduals(q, jnp.zeros(q.shape[:3]))
  why_not_cudnn = "packed sequences" if is_packed else "cannot cap scores"
  for op, *args in (
    (ops.attention_fwd, q, q, q, segments),
    (ops.attention_bwd, q, q, q, q, residuals, segments),
  ):
    how = dict(kind=AttentionKind(soft_cap=soft_cap))
    with on(H200):
      assert explain(op, *args, **how) == "mosaic on a GPU, xla elsewhere"
    for kind, found in ((A100, 8.0), (L4, 8.9), (B200, 10.0), (RTX, 12.0)):
      with on(kind):
        said = explain(op, *args, **how)
      assert said.startswith("xla everywhere (") and why_not_cudnn in said
      assert f"needs compute capability 9.0 (Hopper), got {found})" in said


@pytest.mark.parametrize("codec", ["coat", "log8"])
def test_optimizer_kernel_needs_hopper_or_newer(codec):
  optimizer = fused_coat_adamw(1e-3, codec=getattr(codecs, codec)())
  params = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
  for kind, has_kernel in ((A100, 0), (L4, 0), (H200, 1), (B200, 1), (RTX, 1)):
    with on(kind):
      [said] = optimizer.explain(params).values()
    assert ("mosaic on a GPU" in said) == has_kernel
    why = "a Mosaic GPU kernel needs compute capability 9.0 or newer, got 8."
    assert (why in said) != has_kernel


def test_saved_values_have_a_barrier_on_gpus_without_fp8():
  for kind, has_barrier in ((A100, True), (L4, False), (H200, False)):
    with on(kind):
      program = str(jax.make_jaxpr(lambda x: rule._only_saved(x))(X))
    assert ("optimization_barrier" in program) == has_barrier
