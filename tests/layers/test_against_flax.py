# SPDX-License-Identifier: Apache-2.0
"""Compares layers with flax: arguments, dtypes, attributes and results."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import P
from jax.sharding import NamedSharding

from coat_jax import recipes
from coat_jax.layers import Attention, BlockOptions
from tests.comparing import assert_close, assert_same_bits, jit
from tests.layers.test_parameters import (
  INIT,
  KINDS,
  MODULES,
  D,
  make,
  make_mesh,
)
from tests.matrices import quick

# Arguments ----------------------------------------------------------------

TAKEN = {*BlockOptions.__annotations__}
TAKEN |= {"dtype", "param_dtype", "use_bias", "use_scale", "epsilon"}
TAKEN |= {"num_kv_heads"}
# Arguments that are positional in our modules, or have another name there.
SIZES = {"self", "rngs", "num_features", "num_heads"}


THEIRS = {
  "Linear": (nnx.Linear, nnx.LinearGeneral),
  "RMSNorm": (nnx.RMSNorm,),
  "LayerNorm": (nnx.LayerNorm,),
  "NormLinear": (nnx.Linear,),
  "MLP": (nnx.Linear,),
  "UngatedMLP": (nnx.Linear,),
  "Attention": (nnx.MultiHeadAttention,),
}


def arguments_of_flax(name):
  """Yields names and defaults of flax's arguments, except sizes."""
  for theirs in THEIRS[name]:
    for argument in inspect.signature(theirs.__init__).parameters.values():
      is_size = argument.name in {"in_features", "out_features"}
      if argument.name not in SIZES and (not is_size or name == "Attention"):
        yield argument.name, argument.default


@pytest.mark.parametrize("name", MODULES)
def test_arguments_of_flax_are_accepted_or_refused(name):
  for argument, default in arguments_of_flax(name):
    if argument not in TAKEN:
      with pytest.raises(TypeError, match=rf"unexpected .* '{argument}'"):
        make(name, **{argument: object()})
    elif default is not inspect.Parameter.empty:
      value = {argument: default}
      nnx.eval_shape(lambda value=value: make(name, **value))


def test_arguments_of_flax_are_found():
  names = {a for name in MODULES for a, _ in arguments_of_flax(name)}
  assert {"precision", "batch_axis", "reduction_axes", "attention_fn"} <= names


@pytest.mark.parametrize("name", MODULES)
def test_misspelled_argument_is_a_type_error(name):
  with pytest.raises(TypeError, match=r"unexpected .* 'presicion'"):
    make(name, presicion="high")


def test_norm_linear_refuses_out_kernel_init():
  with pytest.raises(TypeError, match="unexpected .* 'out_kernel_init'"):
    make("NormLinear", out_kernel_init=INIT)


# Calls --------------------------------------------------------------------


@pytest.mark.parametrize(
  "name, kind",
  quick(
    3,
    [
      ("Linear", "auto"),
      ("Linear", "explicit"),
      ("Attention", "auto"),
      ("Attention", "explicit"),
      *((name, kind) for name in ("MLP", "UngatedMLP") for kind in KINDS),
      *(("NormLinear", kind) for kind in KINDS),
    ],
  ),
)
def test_out_sharding_shards_the_output(name, kind):
  mesh = make_mesh(kind)
  x = jnp.ones((8, 4, D), jnp.bfloat16)
  module = make(name)
  with jax.set_mesh(mesh):
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    for out_sharding in (
      P("data", None, "fsdp"),
      NamedSharding(mesh, P("fsdp", None, None)),
    ):
      y = jax.jit(lambda x, s=out_sharding: module(x, out_sharding=s))(x)
      want = NamedSharding(mesh, getattr(out_sharding, "spec", out_sharding))
      assert y.sharding.is_equivalent_to(want, y.ndim)


def test_arguments_are_attributes_as_in_flax():
  ours, theirs = make("Linear"), nnx.Linear(D, 32, rngs=nnx.Rngs(0))
  names = ("in_features", "out_features", "use_bias", "param_dtype")
  for name in names:
    assert getattr(ours, name) == getattr(theirs, name)
  ours, theirs = make("LayerNorm"), nnx.LayerNorm(D, rngs=nnx.Rngs(0))
  names = ("num_features", "epsilon", "use_scale", "use_bias", "param_dtype")
  for name in names:
    assert getattr(ours, name) == getattr(theirs, name)


COUNTERPARTS = {
  "Linear": lambda **k: nnx.Linear(D, 32, rngs=nnx.Rngs(0), **k),
  "RMSNorm": lambda **k: nnx.RMSNorm(D, rngs=nnx.Rngs(0), **k),
  "LayerNorm": lambda **k: nnx.LayerNorm(D, rngs=nnx.Rngs(0), **k),
}


DTYPES = [
  # (dtype, dtype of the parameters, dtype of the input)
  (None, jnp.float32, jnp.float32),
  (None, jnp.float32, jnp.bfloat16),
  (None, jnp.bfloat16, jnp.float32),
  (None, jnp.bfloat16, jnp.bfloat16),
  (jnp.float32, jnp.bfloat16, jnp.bfloat16),
  (jnp.bfloat16, jnp.float32, jnp.float32),
]


@pytest.mark.parametrize("name", MODULES)
def test_dtype_of_the_output_is_as_in_flax(name):
  theirs = COUNTERPARTS.get(name, COUNTERPARTS["Linear"])
  for dtype, param_dtype, x_dtype in DTYPES:
    x = jnp.ones((2, 4, D), x_dtype)
    options = dict(dtype=dtype, param_dtype=param_dtype)
    got = nnx.eval_shape(lambda x=x, o=options: make(name, **o)(x))
    want = nnx.eval_shape(lambda x=x, o=options: theirs(**o)(x))
    assert got.dtype == want.dtype


def test_norm_without_parameters_has_the_dtype_of_its_input():
  norm = make("RMSNorm", use_scale=False, dtype=None)
  for dtype in (jnp.float32, jnp.bfloat16):
    assert norm(jnp.ones((2, D), dtype)).dtype == dtype


def test_f32_results_are_not_rounded_to_bf16():
  x = jax.random.normal(jax.random.key(0), (8, 4, D))
  y, coarse = (make("NormLinear", dtype=d)(x) for d in (jnp.float32, None))
  assert_same_bits(y, coarse)
  assert jnp.any(y != y.astype(jnp.bfloat16).astype(jnp.float32))


# Results ------------------------------------------------------------------


class FlaxUngatedMLP(nnx.Module):
  """`MLP` without a gate, built from flax's layers."""

  def __init__(self, *, rngs):
    self.norm = nnx.RMSNorm(D, rngs=rngs)
    self.up = nnx.Linear(D, 32, use_bias=False, rngs=rngs)
    self.down = nnx.Linear(32, D, use_bias=False, rngs=rngs)

  def __call__(self, x):
    return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class FlaxMLP(nnx.Module):
  """`MLP`, built from flax's layers."""

  def __init__(self, *, rngs):
    self.norm = nnx.RMSNorm(D, rngs=rngs)
    self.gate_up = nnx.LinearGeneral(D, (2, 32), use_bias=False, rngs=rngs)
    self.down = nnx.Linear(32, D, use_bias=False, rngs=rngs)

  def __call__(self, x):
    y = self.gate_up(self.norm(x))
    return x + self.down(jax.nn.silu(y[..., 0, :]) * y[..., 1, :])


class FlaxNormLinear(nnx.Module):
  """`NormLinear`, built from flax's layers."""

  def __init__(self, *, rngs):
    self.norm = nnx.RMSNorm(D, rngs=rngs)
    self.linear = nnx.Linear(D, 32, rngs=rngs)

  def __call__(self, x):
    return self.linear(self.norm(x))


RESULTS = {
  "Linear": COUNTERPARTS["Linear"],
  "RMSNorm": COUNTERPARTS["RMSNorm"],
  "LayerNorm": COUNTERPARTS["LayerNorm"],
  "NormLinear": lambda: FlaxNormLinear(rngs=nnx.Rngs(1)),
  "MLP": lambda: FlaxMLP(rngs=nnx.Rngs(1)),
  "UngatedMLP": lambda: FlaxUngatedMLP(rngs=nnx.Rngs(1)),
}


def gradients(module, x, **call):
  """Returns the output, and gradients of input and parameters."""
  graph, params = nnx.split(module)

  @jit
  def run(params, x):
    f = lambda params, x: nnx.merge(graph, params)(x, **call)  # noqa: E731
    y, vjp = jax.vjp(f, params, x)
    dparams, dx = vjp(jax.random.normal(jax.random.key(1), y.shape))
    return y, dx, dparams

  return run(params, x)


@pytest.mark.parametrize("name", RESULTS)
def test_results_in_f32_without_fp8_match_flax(name):
  ours = make(name, recipe=recipes.bf16(), dtype=None)
  theirs = RESULTS[name]()
  nnx.update(ours, nnx.state(theirs))
  x = jax.random.normal(jax.random.key(0), (2, 4, D))
  # Only the order of f32 sums of at most 32 products differs.
  assert_close(gradients(ours, x), gradients(theirs, x), 2e-6)


def test_attention_in_f32_without_fp8_matches_flax():
  n, k, h = 4, 2, 4
  ours = Attention(
    D,
    n,
    num_kv_heads=k,
    norm=None,
    rope_theta=None,
    add_input=False,
    recipe=recipes.bf16(),
    dtype=None,
    rngs=nnx.Rngs(0),
  )
  theirs = nnx.MultiHeadAttention(
    n, D, num_kv_heads=k, use_bias=False, decode=False, rngs=nnx.Rngs(1)
  )
  # For each key head, columns are in the order queries, key, value.
  columns = ours.qkv.linear.kernel[...].reshape(D, k, n // k + 2, h)
  theirs.query.kernel[...] = columns[:, :, : n // k].reshape(D, n, h)
  theirs.key.kernel[...] = columns[:, :, -2]
  theirs.value.kernel[...] = columns[:, :, -1]
  theirs.out.kernel[...] = ours.out.kernel[...].reshape(n, h, D)
  x = jax.random.normal(jax.random.key(0), (2, 4, D))
  y, dx, dparams = gradients(ours, x)
  want, want_dx, want_dparams = gradients(theirs, x, is_causal=True)
  assert_close((y, dx), (want, want_dx), 5e-6)
  got = dparams["qkv"]["linear"]["kernel"].reshape(D, k, n // k + 2, h)
  for part, name in ((got[:, :, -2], "key"), (got[:, :, -1], "value")):
    assert_close(part, want_dparams[name]["kernel"], 5e-6)
