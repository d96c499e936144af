# SPDX-License-Identifier: Apache-2.0
"""Tests how operations choose an implementation and explain the choice."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from coat_jax import ops
from coat_jax.numerics.scaling import Operand
from coat_jax.ops import cublas, quantize_tensor
from coat_jax.ops.dispatch import kernel, op
from coat_jax.ops.types import Unsupported

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("H200", 132, "cuda"))


def operands(m=16, k=32, n=48):
  x = jax.random.normal(jax.random.key(0), (m, k))
  w = jax.random.normal(jax.random.key(1), (k, n))
  return quantize_tensor(x), quantize_tensor(w, layout="columns")


def primitives(f, *args):
  """Returns the names of a function's primitives, including nested ones."""
  names = set()

  def visit(jaxpr):
    for eqn in jaxpr.eqns:
      names.add(eqn.primitive.name)
      for sub in jaxprs_in_params(eqn.params):
        visit(sub)

  visit(jax.make_jaxpr(f)(*args).jaxpr)
  return names


def test_implementation_is_chosen_when_an_op_is_lowered():
  x, w = operands()
  with jax.sharding.use_abstract_mesh(H200):
    assert "platform_index" in primitives(ops.linear_fwd, x, w)
    text = {
      platform: jax.jit(ops.linear_fwd)
      .trace(x, w)
      .lower(lowering_platforms=(platform,))
      .as_text()
      for platform in ("cpu", "cuda")
    }
  # This dot algorithm makes XLA call cuBLASLt.
  assert "algorithm" in text["cuda"] and "algorithm" not in text["cpu"]


def test_op_on_a_mesh_of_gpus_does_not_branch_on_the_platform():
  devices = AbstractMesh(
    (2,), ("fsdp",), (AxisType.Auto,), abstract_device=H200.abstract_device
  )

  def amax_of_all(x):
    specs = dict(in_specs=P("fsdp"), out_specs=P(), check_vma=False)
    scale = functools.partial(
      ops.tensor_scale, scaling=ops.PerTensor(axis_names=("fsdp",))
    )
    return jax.shard_map(scale, mesh=devices, **specs)(x)

  x = jnp.ones((32, 128), jnp.bfloat16)
  found = primitives(amax_of_all, x)
  # For a collective inside a conditional, the host would have to evaluate the
  # condition.
  assert "pmax" in found and "platform_index" not in found
  assert "mpmd_map" in found


@pytest.mark.parametrize("m", [6, 0])
def test_xla_runs_what_a_kernel_refuses(m):
  x, w = operands(m=m)
  with jax.sharding.use_abstract_mesh(H200):
    assert "platform_index" not in primitives(ops.linear_fwd, x, w)
  assert ops.explain(ops.linear_fwd, x, w) == (
    "linear_fwd: xla everywhere (linear_fwd: cuBLASLt needs FP8 matrices whose "
    f"sizes are multiples of 16, got [{m}, 32] times [32, 48]; "
    "linear_fwd: the Mosaic kernel needs one scale per block of 128, got one "
    "scale per tensor)"
  )
  assert ops.explain(ops.linear_fwd, *operands()) == (
    "linear_fwd: cublas on a GPU, xla elsewhere"
  )
  said = ops.explain(ops.activation_bwd, activation="silu")
  assert "there is no kernel" in said


def test_kernel_is_traced_once():
  traces = []

  @kernel(lambda x: None)
  def doubled(x):
    traces.append(x)
    return 2 * x

  double = op(mosaic=doubled)(lambda x: x + x)
  with jax.sharding.use_abstract_mesh(H200):
    jax.jit(double).trace(jnp.ones(3))
  assert len(traces) == 1


def test_errors_other_than_unsupported_are_raised():
  traces = []

  def doubled(x):
    traces.append(x)
    raise NotImplementedError("Pallas cannot lower sort")

  double = op(mosaic=doubled)(lambda x: 2 * x)
  with jax.sharding.use_abstract_mesh(H200):
    with pytest.raises(NotImplementedError, match="cannot lower sort"):
      jax.jit(double).trace(jnp.ones(3))
  assert len(traces) == 1


def test_named_implementation_never_falls_back():
  x, w = operands(m=6)
  with pytest.raises(NotImplementedError, match="multiples of 16.*=None"):
    ops.linear_fwd(x, w, implementation="cublas")
  with pytest.raises(NotImplementedError, match="'xla', 'cublas'.*'cuda'"):
    ops.linear_fwd(x, w, implementation="cuda")
  assert ops.linear_fwd.implementations == ("xla", "cublas", "mosaic")


@pytest.mark.parametrize(
  "capability, has_fp8",
  [
    ("8.0", False),
    ("8.9", True),
    ("9.0", True),
    ("10.0", True),
    ("gfx942", False),
  ],
)
def test_fp8_kernels_run_only_on_nvidia_gpus_with_fp8(
  monkeypatch, capability, has_fp8
):
  class Device:
    compute_capability = capability

  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
  # JAX would not trace the same function again, so define one per case.
  found = primitives(lambda x, w: ops.linear_fwd(x, w), *operands())
  assert ("platform_index" in found) == has_fp8
  # An abstract GPU of an unknown kind is assumed to be like the local GPU.
  device = jax.sharding.AbstractDevice("another", 100, "cuda")
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    found = primitives(lambda x, w: ops.linear_fwd(x, w), *operands())
  assert ("platform_index" in found) == has_fp8


def test_with_several_gpus_kernels_run_only_inside_shard_map(monkeypatch):
  x = jnp.ones((64, 128))
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert jax.device_count() > 1

  def explain(x):
    return ops.explain(ops.quantize_groups, x, groups=ops.Groups(16))

  assert "only inside jax.shard_map" in explain(x)
  # XLA can partition calls of cuBLASLt and cuDNN.
  assert "cublas on a GPU" in ops.explain(ops.linear_fwd, *operands())
  found = []
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((8,), ("data",), axis_types=auto)
  jax.eval_shape(
    jax.shard_map(
      lambda x: found.append(explain(x)) or x,
      mesh=mesh,
      in_specs=jax.P("data"),
      out_specs=jax.P("data"),
    ),
    x,
  )
  assert found[-1] == "quantize_groups: mosaic on a GPU, xla elsewhere"


def test_inconsistent_operands_are_refused():
  x, w = operands()
  with pytest.raises(ValueError, match="x in rows and a weight"):
    ops.linear_fwd(x, Operand(w.columns, None, w.scale))
  narrow = quantize_tensor(jnp.ones((31, 48)), layout="columns")
  with pytest.raises(ValueError, match="linear: x.*needs a weight"):
    ops.linear_fwd(x, narrow)
  q, k = jnp.ones((1, 4, 3, 8)), jnp.ones((1, 4, 2, 8))
  with pytest.raises(ValueError, match="N a multiple of K"):
    ops.attention_fwd(q, k, k, kind=ops.AttentionKind())


def attention_arrays(n=4, k=2, t=32, s=32, h=64, dtype=jnp.bfloat16):
  q, kv = jnp.zeros((2, t, n, h), dtype), jnp.zeros((2, s, k, h), dtype)
  return q, kv, kv


def test_cudnn_refuses_unsupported_arguments():
  def explain(causal=True, **shapes):
    arrays = attention_arrays(**shapes)
    kind = ops.AttentionKind(causal)
    return ops.explain(ops.attention_fwd, *arrays, kind=kind)

  # `explain` does not look for cuDNN, which need not be installed.
  assert explain() == "attention_fwd: cudnn on a GPU, xla elsewhere"
  assert "float32" in explain(dtype=jnp.float32)
  assert "multiples of 8 up to 256, got 12" in explain(h=12)
  assert "got 512" in explain(h=512)
  assert "as many queries as keys" in explain(s=48)
  assert "cudnn on a GPU" in explain(s=48, causal=False)


def test_explain_refuses_what_a_call_refuses():
  q, k, v = attention_arrays(n=4, k=3)
  kind = ops.AttentionKind()
  with pytest.raises(ValueError, match="N a multiple of K"):
    ops.explain(ops.attention_fwd, q, k, v, kind=kind)
  residuals = ops.AttentionResiduals(q, jnp.zeros(q.shape[:3]))
  with pytest.raises(ValueError, match="N a multiple of K"):
    ops.explain(ops.attention_bwd, q, q, k, v, residuals, kind=kind)
  with pytest.raises(TypeError, match="arguments must be arrays, got 1"):
    ops.explain(ops.attention_fwd, 1, k, v, kind=kind)
  with pytest.raises(ValueError, match="layout must be one of"):
    ops.explain(ops.quantize_tensor, k, layout="diagonal")


def test_cublas_refuses_dtypes_that_it_cannot_write():
  x, w = operands()
  with pytest.raises(Unsupported, match="bfloat16, float16 or float32"):
    cublas.linear_fwd(x, w, dtype=jnp.float8_e4m3fn)
