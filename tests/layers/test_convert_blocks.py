# SPDX-License-Identifier: Apache-2.0
"""Tests which blocks `convert` finds or refuses, and what it reports."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from coat_jax import layers, recipes
from coat_jax.layers import convert
from coat_jax.layers.converted import FusedBlock
from coat_jax.layers.count import saved_bytes
from tests.comparing import assert_close
from tests.layers.converting import (
  MLP,
  D,
  F,
  FeedForward,
  Head,
  activations,
  converted,
  flat_state,
  run,
)

SHAPE = jax.ShapeDtypeStruct((2, 256, D), jnp.bfloat16)

# Blocks ---------------------------------------------------------------------

ACTIVATIONS = {
  "silu": nnx.silu,
  "gelu": functools.partial(nnx.gelu, approximate=False),
  "gelu_tanh": nnx.gelu,
  "gelu_quick": lambda x: x * nnx.sigmoid(1.702 * x),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gate_and_activation_are_found(name):
  model = FeedForward(activation=ACTIVATIONS[name], rngs=nnx.Rngs(0))
  new, _ = convert(model, blocks={FeedForward: layers.MLP})
  roles = new.roles
  assert (roles.front, roles.back) == (("b", "a"), "down")
  assert roles.middle == layers.Elementwise(name)
  assert (roles.norm, roles.add_input) == (None, False)
  # Other attributes are kept.
  assert new.hidden == F


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_norm_and_residual_add_are_found(name):
  model = MLP(activation=ACTIVATIONS[name], rngs=nnx.Rngs(0))
  new, _ = convert(model, blocks={MLP: layers.MLP})
  roles = new.roles
  assert (roles.front, roles.back, roles.norm) == (("up",), "down", "norm")
  assert roles.middle == layers.Elementwise(name, gated=False)
  assert roles.add_input


class Fused(nnx.Module):
  """An MLP with gate and up in one matrix; the gate comes first or last."""

  def __init__(self, columns, *, gate=0, rngs):
    self.gate_up = nnx.LinearGeneral(D, columns, rngs=rngs)
    self.down = nnx.Linear(F, D, rngs=rngs)
    self.gate = gate

  def __call__(self, x):
    y = self.gate_up(x).reshape(*x.shape[:-1], 2, F)
    gate, up = y[..., self.gate, :], y[..., 1 - self.gate, :]
    return x + self.down(nnx.silu(gate) * up)


@pytest.mark.parametrize("columns", [(2, F), (2 * F,)])
def test_fused_gate_and_up_are_found(columns):
  model, x = Fused(columns, rngs=nnx.Rngs(0)), activations()
  model.gate_up.bias[...] = jnp.linspace(-1, 1, 2 * F).reshape(columns)
  blocks = {Fused: layers.MLP}
  new, report = convert(model, recipes.bf16(), blocks=blocks)
  assert report.replaced == {".": "MLP"}
  assert_close(run(new, x), run(model, x), 1e-5)


def test_fused_gate_after_up_is_not_converted():
  model = Fused((2, F), gate=1, rngs=nnx.Rngs(0))
  new, report = convert(model, blocks={Fused: layers.MLP})
  assert type(new) is Fused and "output differs" in report.left["."]


def test_nested_and_shared_blocks_are_found():
  mlp, other = MLP(rngs=nnx.Rngs(0)), MLP(rngs=nnx.Rngs(1))
  model = nnx.Dict(z=mlp, b=nnx.List([mlp]), a=nnx.data({"k": [(other,)]}))
  new, report = convert(model, blocks={MLP: layers.MLP})
  assert sorted(report.replaced.items()) == [("a.k.0.0", "MLP"), ("b.0", "MLP")]
  assert type(new.z) is FusedBlock and new.z is new.b[0]
  assert new.a["k"][0][0].up.kernel is other.up.kernel


class Heads(nnx.Module):
  """A norm and a matmul with two output axes, which form no block."""

  def __init__(self, *, rngs):
    self.norm = nnx.RMSNorm(D, rngs=rngs)
    self.up = nnx.LinearGeneral(D, (2, F // 2), rngs=rngs)

  def __call__(self, x):
    return self.up(self.norm(x))


def test_norm_and_matmul_with_two_output_axes_form_no_block():
  model = Heads(rngs=nnx.Rngs(0))
  new, report = convert(model, blocks={Heads: layers.NormLinear})
  assert type(new) is Heads and type(new.up) is layers.Linear
  assert "in number, width or bias" in report.left["."]


class Refused(nnx.Module):
  """An MLP that differs from a block in one respect."""

  def __init__(self, why, *, rngs):
    self.up = nnx.Linear(D, F, rngs=rngs)
    self.down = nnx.Linear(F, D, rngs=rngs)
    self.why = why
    if why == "drops 0.5":
      self.dropout = nnx.Dropout(0.5, rngs=rngs)
    if why == "variables outside":
      self.gain = nnx.Param(jnp.ones(()))
    if why == "`up` was not replaced":
      self.up.precision = "highest"
    if why == "in number, width or bias":
      self.third = nnx.Linear(D, D, rngs=rngs)

  def __call__(self, x, *others):
    if self.why == "callable with one array":
      (mask,) = others
      x = x * mask
    y = self.up(x)
    y = nnx.relu(y) if self.why == "output differs" else nnx.gelu(y)
    if self.why == "differs by":
      y = 1.0001 * y
    return self.down(y)


REASONS = [
  "drops 0.5",
  "variables outside",
  "`up` was not replaced",
  "in number, width or bias",
  "callable with one array",
  "output differs",
  "differs by",
]


@pytest.mark.parametrize("why", REASONS)
def test_modules_that_differ_from_a_block_are_kept(why):
  model = Refused(why, rngs=nnx.Rngs(0))
  new, report = convert(model, blocks={Refused: layers.MLP})
  assert type(new) is Refused
  assert why in report.left["."]
  assert type(new.down) is layers.Linear
  assert report.matmuls_only == ("Refused",)


def test_module_without_any_difference_becomes_a_block():
  new, _ = convert(Refused("", rngs=nnx.Rngs(0)), blocks={Refused: layers.MLP})
  assert type(new) is FusedBlock


def test_dropout_at_rate_zero_is_allowed():
  model = Refused("", rngs=nnx.Rngs(0))
  model.dropout = nnx.Dropout(0.0, rngs=nnx.Rngs(1))
  new, _ = convert(model, blocks={Refused: layers.MLP})
  assert type(new) is FusedBlock
  assert flat_state(new).keys() == flat_state(model).keys()


def test_unhashable_attribute_is_kept():
  model = Refused("", rngs=nnx.Rngs(0))
  model.sizes = {"hidden": F}
  new, _ = convert(model, blocks={Refused: layers.MLP})
  assert type(new) is FusedBlock and new.sizes == model.sizes


# Reports --------------------------------------------------------------------


def precise(x, y, dimensions, **options):
  return jax.lax.dot_general(x, y, dimensions, **options)


class Sublinear(nnx.Linear):
  """A user's subclass."""


def with_gain(module):
  module.gain = nnx.Param(jnp.ones(()))
  return module


LEFT = {
  "precision": (
    lambda r: nnx.Linear(D, F, precision="highest", rngs=r),
    "precision must be left out",
  ),
  "dot_general": (
    lambda r: nnx.Linear(D, F, dot_general=precise, rngs=r),
    "dot_general must be left out",
  ),
  "axis": (
    lambda r: nnx.LinearGeneral(D, F, axis=1, rngs=r),
    "axis must be left out",
  ),
  "batch_axis": (
    lambda r: nnx.LinearGeneral(D, F, batch_axis={0: 2}, rngs=r),
    "batch_axis must be left out",
  ),
  "reduction_axes": (
    lambda r: nnx.RMSNorm(D, reduction_axes=(-2, -1), rngs=r),
    "reduction_axes must be left out",
  ),
  "complex": (
    lambda r: nnx.Linear(D, F, param_dtype=jnp.complex64, rngs=r),
    "param_dtype must be a floating dtype",
  ),
  "conv": (lambda r: nnx.Conv(D, F, 3, rngs=r), "Conv: there is no FP8 layer"),
  "embed": (lambda r: nnx.Embed(8, D, rngs=r), "Embed: there is no FP8 layer"),
  "addition": (lambda r: with_gain(nnx.Linear(D, F, rngs=r)), "holds `gain`"),
  "subclass": (lambda r: Sublinear(D, F, rngs=r), "a subclass of Linear"),
}


@pytest.mark.parametrize("name", LEFT)
def test_report_says_why_a_module_was_not_converted(name):
  make, why = LEFT[name]
  model = nnx.Dict(
    it=make(nnx.Rngs(0)), plain=nnx.Linear(D, F, rngs=nnx.Rngs(0))
  )
  new, report = convert(model)
  assert type(new.it) is type(model.it)
  assert why in report.left["it"]
  assert report.replaced == {"plain": "Linear"}
  assert f"left it: {report.left['it']}" in str(report)


def test_norm_with_accurate_variance_is_replaced():
  norm = nnx.LayerNorm(D, use_fast_variance=False, rngs=nnx.Rngs(0))
  new, _ = convert(norm)
  assert type(new) is layers.LayerNorm


def test_report_counts_replaced_modules():
  _, _, report, _ = converted("transformer", has_blocks=True)
  text = str(report)
  assert "4 Linear, 2 MLP, 1 NormLinear, 4 RMSNorm" in text
  assert report.matmuls_only == ("Attention",)
  assert "bytes" not in text and report.saved_before is None
  _, _, report, _ = converted("transformer", has_blocks=False)
  assert "11 Linear, 5 RMSNorm" in str(report)
  assert set(report.matmuls_only) == {"Attention", "FeedForward", "Head"}
  assert "matmuls only: " in str(report)
  assert str(convert(nnx.Dict())[1]) == "replaced: nothing"
  ours = nnx.List([layers.MLP(D, 2 * D, rngs=nnx.Rngs(0))])
  assert str(convert(ours)[1]) == "replaced: nothing"


BF16 = dict(dtype=jnp.bfloat16)


@pytest.mark.parametrize(
  "make, blocks",
  [
    (lambda r: MLP(**BF16, rngs=r), {MLP: layers.MLP}),
    (lambda r: FeedForward(**BF16, rngs=r), {FeedForward: layers.MLP}),
    (lambda r: Head(**BF16, rngs=r), {Head: layers.NormLinear}),
  ],
)
def test_blocks_save_at_most_a_third_of_the_bytes(make, blocks):
  model = make(nnx.Rngs(0))
  _, fused = convert(model, blocks=blocks, inputs=(SHAPE,))
  assert fused.saved_after <= fused.saved_before / 3
  assert f"{fused.saved_after:,} after" in str(fused)
  _, alone = convert(model, inputs=(SHAPE,))
  assert alone.saved_before == fused.saved_before
  assert fused.saved_after < alone.saved_after < alone.saved_before
  assert "matmuls only" in str(alone) and "matmuls only" not in str(fused)


def test_separate_gate_and_up_save_as_many_bytes_as_fused_ones():
  model = FeedForward(**BF16, rngs=nnx.Rngs(0))
  _, report = convert(model, blocks={FeedForward: layers.MLP}, inputs=(SHAPE,))
  ours = layers.MLP(D, F, norm=None, add_input=False, rngs=nnx.Rngs(0))
  # The two may save different numbers of per-tensor scales.
  assert report.saved_after == pytest.approx(
    saved_bytes(ours, (SHAPE,)), abs=64
  )


def test_concatenated_weights_of_gate_and_up_are_not_saved():
  model = FeedForward(**BF16, rngs=nnx.Rngs(0))
  new, _ = convert(model, blocks={FeedForward: layers.MLP})
  graph, params = nnx.split(new)

  def saved(params, x):
    run = lambda params, x: nnx.merge(graph, params)(x)  # noqa: E731
    return jax.tree.leaves(jax.vjp(run, params, x)[1])

  shapes = [array.shape for array in jax.eval_shape(saved, params, SHAPE)]
  assert (D, F) in shapes and (D, 2, F) not in shapes


def test_separate_gate_and_up_compute_no_matmul_twice():
  model = FeedForward(**BF16, rngs=nnx.Rngs(0))
  new, _ = convert(model, blocks={FeedForward: layers.MLP})
  graph, params = nnx.split(new)

  def gradients(params, x):
    loss = lambda *args: jnp.sum(nnx.merge(graph, args[0])(args[1]))  # noqa: E731
    return jax.grad(loss, (0, 1))(params, x)

  # The forward pass needs two matmuls, the backward pass four.
  assert (
    str(jax.make_jaxpr(gradients)(params, SHAPE)).count("dot_general[") == 6
  )


def test_reported_bytes_are_those_of_the_saved_input():
  rows = SHAPE.shape[0] * SHAPE.shape[1]
  linear = nnx.Linear(D, F, use_bias=False, **BF16, rngs=nnx.Rngs(0))
  _, report = convert(linear, inputs=(SHAPE,))
  assert report.saved_before == 2 * rows * D
  # The converted layer saves codes of x, its scale and the weight's scale.
  assert rows * D < report.saved_after <= rows * D + 8
  new, _ = convert(linear)
  # `jax.vjp` of the converted layer saves one code per element of x.
  graph, params = nnx.split(new)
  x = jnp.ones(SHAPE.shape, SHAPE.dtype)
  kept = jax.tree.leaves(jax.vjp(lambda p: nnx.merge(graph, p)(x), params)[1])
  sizes = [a.nbytes for a in kept if a.dtype == jnp.float8_e4m3fn]
  assert sum(sizes) == rows * D


def test_input_shared_by_several_matmuls_counts_once():
  class Twins(nnx.Module):
    def __init__(self, *, rngs):
      self.a = nnx.Linear(D, F, use_bias=False, **BF16, rngs=rngs)
      self.b = nnx.Linear(D, F, use_bias=False, **BF16, rngs=rngs)

    def __call__(self, x):
      return self.a(x), self.b(x), self.b(x.reshape(-1, D))

  model = Twins(rngs=nnx.Rngs(0))
  assert saved_bytes(model, (SHAPE,)) == 2 * 512 * D


def test_inputs_may_be_arrays_shapes_or_plain_values():
  class Twice(nnx.Module):
    def __init__(self, *, rngs):
      self.linear = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x, number, mask=None):
      for _ in range(number):
        x = self.linear(x)
      return x if mask is None else x * mask

  model = Twice(rngs=nnx.Rngs(0))
  x = jnp.ones((4, D), jnp.float32)
  once, twice, shapes = (
    convert(model, inputs=inputs)[1].saved_before
    for inputs in (
      (x, 1, None),
      (x, 2),
      (jax.ShapeDtypeStruct(x.shape, x.dtype), 2),
    )
  )
  assert twice == shapes == 2 * once == 2 * 4 * D * 4
