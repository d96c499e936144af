# SPDX-License-Identifier: Apache-2.0
"""Adds a kernel to an operation of coat_jax from outside the library."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from coat_jax import ops
from coat_jax.ops.dispatch import kernel
from tests.comparing import assert_close, jit
from tests.pallas.kernels import lowered_for_h200, needs_interpreter, refused

TILE = 128


def why_not(dy, parts, activation, **_):
  if len(parts) > 1:
    return "this kernel takes no gate"
  if activation != "silu":
    return f"this kernel computes silu, got {activation!r}"
  if dy.size % TILE:
    return f"this kernel takes multiples of {TILE} values, got {dy.shape}"


@kernel(why_not)
def silu_bwd(dy, parts, *, activation, interpret=False):
  """Computes `ops.activation_bwd` for SiLU."""
  (x,) = parts
  scale = jnp.repeat(x.scale.astype(jnp.float32), x.group_size, axis=-1)
  run = plgpu.kernel(
    _kernel,
    out_type=jax.ShapeDtypeStruct((dy.size,), jnp.float32),
    grid=(dy.size // TILE,),
    grid_names=("tile",),
    interpret=plgpu.InterpretGPUParams() if interpret else False,
  )
  dx = run(*(a.reshape(-1) for a in (dy, x.qvalue, scale)))
  return (dx.reshape(dy.shape),)


def _kernel(dy_gmem, codes_gmem, scale_gmem, dx_gmem):
  tile = pl.ds(jax.lax.axis_index("tile") * TILE, TILE)
  x = codes_gmem[tile].astype(jnp.float32) * scale_gmem[tile]
  sigmoid = 1 / (1 + jnp.exp(-x))
  slope = sigmoid * (1 + x * (1 - sigmoid))
  dx_gmem[tile] = dy_gmem[tile].astype(jnp.float32) * slope


@pytest.fixture
def registered(monkeypatch):
  monkeypatch.setitem(ops.activation_bwd.kernels, "own", silu_bwd)


def arguments():
  dy, x = jax.random.normal(jax.random.key(0), (2, 4, 128))
  return dy, (ops.quantize_groups(x, groups=ops.Groups(16)),)


@needs_interpreter
def test_kernel_matches_the_definition():
  silu = functools.partial(silu_bwd, activation="silu", interpret=True)
  definition = functools.partial(
    ops.activation_bwd.definition, activation="silu"
  )
  # Both sides compute a sigmoid, which is off by an ulp or two.
  assert_close(jit(silu)(*arguments()), jit(definition)(*arguments()), 1e-6)


def test_registered_kernel_is_in_the_program_for_a_gpu(registered):
  silu = functools.partial(ops.activation_bwd, activation="silu")
  assert "mosaic_gpu" in lowered_for_h200(silu, *arguments())
  named = functools.partial(silu, implementation="own")
  assert "mosaic_gpu" in lowered_for_h200(named, *arguments())


def test_explain_and_errors_name_the_registered_kernel(registered):
  said = ops.explain(ops.activation_bwd, *arguments(), activation="silu")
  assert said == "activation_bwd: own on a GPU, xla elsewhere"
  reason = "activation_bwd: this kernel computes silu, got 'gelu'"
  said = ops.explain(ops.activation_bwd, *arguments(), activation="gelu")
  assert said == f"activation_bwd: xla everywhere ({reason})"
  with refused(reason):
    ops.activation_bwd(*arguments(), activation="gelu", implementation="own")


def test_unregistered_name_is_refused():
  with pytest.raises(NotImplementedError, match=r"\('xla',\), got 'own'"):
    ops.activation_bwd(*arguments(), activation="silu", implementation="own")
