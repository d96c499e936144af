# SPDX-License-Identifier: Apache-2.0
"""Tests converted models: parameters, outputs, gradients and training."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from coat_jax import coat_adamw, layers, recipes
from coat_jax.layers import convert
from coat_jax.layers.converted import FusedBlock
from tests.comparing import assert_close, jit
from tests.layers.converting import (
  BLOCKS,
  CASES,
  MLP,
  D,
  F,
  FeedForward,
  Transformer,
  converted,
  flat_state,
  relative,
  run,
)
from tests.matrices import quick

# State ----------------------------------------------------------------------


@pytest.mark.parametrize("name, has_blocks", CASES)
def test_converted_model_shares_its_variables_with_the_original(
  name, has_blocks
):
  model, new, _, _ = converted(name, has_blocks)
  assert flat_state(new) == flat_state(model)
  theirs = dict(nnx.iter_graph(model))
  for path, x in nnx.iter_graph(new):
    if isinstance(x, nnx.Variable):
      assert x is theirs[path], path


def test_conversion_does_not_change_the_original():
  model, new, _, _ = converted("transformer", has_blocks=True)
  kinds = {type(x) for _, x in nnx.iter_modules(model)}
  ours = (layers.Linear, FusedBlock)
  assert not any(issubclass(kind, ours) for kind in kinds)
  assert type(model.layers[0].mlp) is FeedForward
  assert type(new.layers[0].mlp) is FusedBlock


def test_metadata_and_dtypes_are_kept():
  metadata = dict(out_sharding=("a", "b"), eager_sharding=False)
  linear = nnx.Linear(
    D, F, kernel_metadata=metadata, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
  )
  new, _ = convert(linear)
  assert new.kernel is linear.kernel
  assert new.kernel.out_sharding == ("a", "b")
  assert new.param_dtype == jnp.bfloat16 and new.dtype is None


def test_shared_modules_stay_shared():
  _, new, report, _ = converted("stranger", has_blocks=True)
  shared = new.parts["in"][0]
  assert isinstance(shared, layers.Linear)
  assert new.parts["again"] is shared
  assert new.names.last is shared
  assert new.steps.layers[0] is shared
  assert new.tied is not shared and new.tied.kernel is shared.kernel
  assert sorted(report.replaced.values()) == [
    "LayerNorm",
    "Linear",
    "Linear",
    "MLP",
  ]


def test_abstract_models_are_converted():
  abstract = nnx.eval_shape(lambda: Transformer(rngs=nnx.Rngs(0)))
  new, report = convert(abstract, blocks=BLOCKS)
  _, _, concrete, _ = converted("transformer", has_blocks=True)
  assert report.replaced == concrete.replaced
  assert isinstance(new.embed.embedding.get_value(), jax.ShapeDtypeStruct)


def test_conversion_under_eval_shape_finds_blocks():
  make = lambda: convert(MLP(rngs=nnx.Rngs(0)), blocks={MLP: layers.MLP})[0]  # noqa: E731
  assert isinstance(nnx.eval_shape(make), FusedBlock)


def test_converting_twice_changes_nothing():
  _, new, _, _ = converted("transformer", has_blocks=True)
  again, report = convert(new)
  assert report.replaced == {}
  assert nnx.graphdef(again) == nnx.graphdef(new)
  assert [*report.left] == [
    "embed",
    *(f"layers.{i}.attention.kv" for i in (0, 1)),
  ]


def test_layers_not_stacked_along_the_first_axis_are_kept():
  @nnx.vmap(in_axes=0, out_axes=1)
  def stack(rngs):
    return nnx.Linear(D, F, rngs=rngs)

  model = nnx.Sequential(stack(nnx.Rngs(0).split(3)))
  new, report = convert(model)
  assert type(new.layers[0]) is nnx.Linear
  assert "first axis" in report.left["layers.0"]


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_train_and_eval_reach_converted_layers(name):
  recipe = recipes.coat(evaluation="bf16")
  model, new, _, x = converted(name, has_blocks=True, recipe=recipe)
  new.eval()
  assert_close(run(new, x), run(model, x), 1e-5)
  new.train()
  assert relative(run(new, x), run(model, x)) > 1e-3


# Results --------------------------------------------------------------------


@pytest.mark.parametrize("name, has_blocks", CASES)
def test_outputs_without_fp8_match_the_model(name, has_blocks):
  model, new, _, x = converted(name, has_blocks, recipes.bf16())
  # A few layers compute f32 sums of at most F products in a different order.
  assert_close(run(new, x), run(model, x), 1e-5)


@pytest.mark.parametrize("name, has_blocks", CASES)
def test_fp8_outputs_are_close_to_the_model(name, has_blocks):
  model, new, _, x = converted(name, has_blocks)
  error = relative(run(new, x), run(model, x))
  # E4M3 rounds a value by 2^-5 of its magnitude on average, so a product of two
  # values has an error of sqrt(2) * 2^-5. About 10 matmuls and norms follow one
  # another, which adds up to sqrt(10) * sqrt(2) * 2^-5 = 0.14. An error near 0
  # would mean that nothing was rounded.
  assert 1e-3 < error < 0.14


def gradients(model, x):
  graph, params = nnx.split(model)

  def loss(params):
    y = nnx.merge(graph, params)(x)
    weights = jax.random.normal(jax.random.key(1), y.shape)
    return jnp.mean(y.astype(jnp.float32) * weights)

  return jit(jax.grad(loss))(params)


@pytest.mark.parametrize("name, has_blocks", quick(2, CASES))
def test_fp8_gradients_of_all_parameters_are_close_to_the_model(
  name, has_blocks
):
  model, new, _, x = converted(name, has_blocks)
  got = dict(nnx.to_flat_state(gradients(new, x)))
  want = dict(nnx.to_flat_state(gradients(model, x)))
  assert got.keys() == want.keys()
  for path, gradient in got.items():
    # The backward pass adds twice the error of the forward pass, because E5M2
    # has one mantissa bit fewer than E4M3.
    assert relative(gradient[...], want[path][...]) < 3 * 0.14, path


def test_training_lowers_the_loss_and_updates_the_original():
  model, new, _, x = converted("transformer", has_blocks=True)
  optimizer = nnx.Optimizer(new, coat_adamw(1e-2), wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer):
    def loss_of(model):
      logits = model(x[:, :-1]).astype(jnp.float32)
      cross_entropy = optax.softmax_cross_entropy_with_integer_labels
      return jnp.mean(cross_entropy(logits, x[:, 1:]))

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss

  losses = [float(step(new, optimizer)) for _ in range(8)]
  assert losses[-1] < losses[0] / 2
  assert relative(run(new, x), run(model, x)) < 0.14


# Errors ---------------------------------------------------------------------


def test_modules_in_a_cycle_are_refused():
  model = nnx.Dict(a=nnx.Dict())
  model.a.parent = model
  with pytest.raises(
    ValueError, match="must not contain each other, got a.par"
  ):
    convert(model)
