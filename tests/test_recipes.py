# SPDX-License-Identifier: Apache-2.0
"""Tests recipes: presets, valid combinations, and errors."""

import dataclasses
import inspect

import pytest

from coat_jax import recipes
from coat_jax.numerics.formats import E4M3, E5M2, INT8
from coat_jax.numerics.scaling import PerTensor
from coat_jax.recipes import CoatRecipe, MeshAxes


def test_recipes_have_the_names_of_their_presets():
  presets = "bf16", "fp8_linear", "coat", "fp8_block", "int8"
  for preset in (getattr(recipes, name) for name in presets):
    assert preset().name == preset.__name__


def test_presets_set_the_formats_of_each_part():
  bf16, linear, coat = recipes.bf16(), recipes.fp8_linear(), recipes.coat()
  assert (bf16.linear, bf16.nonlinear, bf16.attention) == ("bf16",) * 3
  assert (linear.linear, linear.nonlinear) == ("fp8", "bf16")
  assert (coat.linear, coat.nonlinear) == ("fp8", "fp8")
  assert coat.residuals == "minimal" and coat.attention == "bf16"
  assert coat.group_size == 16 and coat == CoatRecipe()


def test_recipes_describe_what_they_multiply_and_save():
  assert recipes.coat(attention="fp8", group_size=32).describe() == (
    "matmuls      float8_e4m3fn, gradients float8_e5m2; a scale per tensor\n"
    "also saved   inputs of norms and activations in float8_e4m3fn, a scale "
    "per 32 values; their outputs are computed again\n"
    "attention    output saved in BF16; q, k and v in float8_e4m3fn, a scale "
    "per 32 values"
  )
  assert recipes.fp8_linear().describe() == (
    "matmuls      float8_e4m3fn, gradients float8_e5m2; a scale per tensor\n"
    "also saved   BF16\n"
    "attention    q, k, v and output saved in BF16"
  )
  block = recipes.fp8_block(residuals="coat").describe()
  assert "gradients float8_e4m3fn; a scale per 128 values" in block
  assert "their outputs are saved too" in block
  assert (
    recipes.int8().describe().startswith("matmuls      int8, gradients int8")
  )


def test_arguments_of_presets_set_fields_and_keep_the_name():
  fields = dict(
    residuals="coat",
    attention="fp8",
    group_size=32,
    weight_cache="codes",
    implementation="xla",
    evaluation="bf16",
  )
  variant = recipes.coat(**fields)
  assert variant.name == "coat"
  assert dataclasses.asdict(variant) == dict(
    linear="fp8",
    scaling=PerTensor,
    nonlinear="fp8",
    formats=dict(values=E4M3, gradients=E5M2),
    experts="bf16",
    axes=None,
    **fields,
  )
  assert recipes.fp8_linear(evaluation="bf16").evaluation == "bf16"
  assert recipes.fp8_block(**fields).attention == "fp8"
  integers = recipes.Formats(values=INT8, gradients=INT8)
  assert recipes.int8(**fields) == dataclasses.replace(
    variant, formats=integers
  )


def test_evaluation_uses_the_training_recipe_by_default():
  for preset in (recipes.bf16(), recipes.fp8_linear(), recipes.coat()):
    assert preset.for_evaluation() is preset
  for preset in (recipes.fp8_linear, recipes.coat):
    assert preset(evaluation="bf16").for_evaluation() == recipes.bf16()
  axes = MeshAxes(tensor="tensor")
  with_axes = dataclasses.replace(recipes.coat(evaluation="bf16"), axes=axes)
  assert with_axes.for_evaluation().axes == axes


def test_recipes_are_frozen_and_hashable():
  assert hash(recipes.coat()) == hash(recipes.coat())
  assert recipes.coat() != recipes.coat(residuals="coat")
  with pytest.raises(dataclasses.FrozenInstanceError):
    recipes.coat().linear = "bf16"
  with pytest.raises(TypeError):
    CoatRecipe("fp8")  # Arguments are keyword-only.


@pytest.mark.parametrize(
  "field",
  [
    "linear",
    "nonlinear",
    "residuals",
    "attention",
    "evaluation",
  ],
)
def test_error_for_an_unknown_choice_names_the_field_and_the_choice(field):
  # In tests, jaxtyping would raise its own error first.
  init = inspect.unwrap(CoatRecipe.__init__)
  with pytest.raises(ValueError, match=f"{field} must be one of .* got 'fp4'"):
    init(object.__new__(CoatRecipe), **{field: "fp4"})


def test_a_group_size_below_one_is_refused():
  with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
    recipes.coat(group_size=0)


@pytest.mark.parametrize("field", ["nonlinear", "attention"])
def test_fp8_nonlinear_or_attention_needs_fp8_matmuls(field):
  fields = {"linear": "bf16", "nonlinear": "bf16", field: "fp8"}
  with pytest.raises(ValueError, match="linear='bf16' requires"):
    CoatRecipe(**fields)


def test_only_coat_allows_fp8_experts():
  assert recipes.coat(experts="fp8").experts == "fp8"
  assert recipes.coat().experts == "bf16"
  for recipe in (
    recipes.bf16(),
    recipes.fp8_linear(),
    recipes.fp8_block(),
    recipes.int8(),
  ):
    with pytest.raises(ValueError, match="experts='fp8' requires recipe coat"):
      dataclasses.replace(recipe, experts="fp8")
