# SPDX-License-Identifier: Apache-2.0
"""Checks the table of parameters against the modules of every family."""

import jax
import pytest
from flax import nnx

from coat_jax.models import (
  FAMILIES,
  VISION_FAMILIES,
  ModelConfig,
  VisionConfig,
  model_matrices,
)
from coat_jax.models.hf.load import model_of
from coat_jax.models.params import is_stacked, parameter
from coat_jax.optimizer.masks import leaf_path
from coat_jax.recipes import coat

SIZES = dict(num_layers=2, d_model=64, d_ff=128, num_heads=4)
IMAGES = dict(image_size=28, patch_size=14)


def config_of(family):
  if family in VISION_FAMILIES:
    return VisionConfig(family=family, **SIZES, **IMAGES)
  own = dict(num_kv_heads=2, vocab_size=384)
  if FAMILIES[family].positions == "learned":
    own["max_positions"] = 64
  if FAMILIES[family].has_experts:
    own |= dict(num_experts=4, experts_per_token=2)
  return ModelConfig(family=family, **SIZES, **own)


@pytest.mark.parametrize("family", [*FAMILIES, *VISION_FAMILIES])
def test_axes_and_splits_in_the_table_fit_each_parameter(family):
  config = config_of(family)
  matrices = model_matrices(config)
  model = nnx.eval_shape(
    lambda: model_of(config, recipe=coat(), dtype="bfloat16")
  )
  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  for keys, leaf in jax.tree.leaves_with_path(params):
    path = leaf_path(keys)
    own, split = parameter(path), matrices(path, leaf)
    assert not own.axes or len(own.axes) + is_stacked(path) == leaf.ndim, path
    # Muon orthogonalizes only the weight matrices of layers.
    is_product = own.role == "matrix" and is_stacked(path)
    assert (split is not None) == is_product, path
    if split and split.parts:
      assert split.groups * sum(split.parts) == leaf.shape[-1]
