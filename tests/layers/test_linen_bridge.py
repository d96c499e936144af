# SPDX-License-Identifier: Apache-2.0
"""Tests the example of NNX modules inside a Linen model."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from jax import P
from jax.sharding import AxisType

from coat_jax import coat_adamw
from coat_jax.layers import MLP
from coat_jax.numerics.formats import E4M3
from examples import linen_bridge


@pytest.mark.slow
def test_the_example_learns():
  first, last = linen_bridge.main(steps=21)
  # The loss starts at ln(16) = 2.77, and the model soon memorizes its eight
  # training sequences.
  assert first > 2.5
  assert last < 0.5 * first


def test_parameters_and_saved_arrays_match_the_modules():
  model = linen_bridge.Decoder()
  tokens = jnp.zeros((2, 19), jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  params = linen.unbox(params)
  width = linen_bridge.WIDTH
  assert params["mlp_0"]["gate_up"]["kernel"].shape == (width, 2, 96)
  assert params["attention_1"]["qkv"]["norm"]["scale"].shape == (width,)
  kept = jax.eval_shape(
    lambda p, t: jax.tree.leaves(
      jax.vjp(lambda p: model.apply({"params": p}, t), p)[1]
    ),
    params,
    tokens,
  )
  codes = [a.shape for a in kept if a.dtype == E4M3]
  # Each layer saves gate, up and the inputs of two norms.
  assert sorted(codes) == sorted(2 * [(2, 19, width)] * 2 + 4 * [(2, 19, 96)])


@pytest.mark.slow
def test_each_device_has_its_share_of_the_training_state():
  mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
  # Quantize all matrices, although they are below the default size limit.
  optimizer = coat_adamw(1e-2, quantize_mask=lambda path, leaf: leaf.ndim > 1)
  tokens = jnp.zeros((8, 19), jnp.int32)
  state = linen_bridge.make_state(
    linen_bridge.Decoder(), tokens, optimizer, mesh
  )
  leaves = jax.tree.leaves_with_path(state)
  whole = [
    jax.tree_util.keystr(path)
    for path, leaf in leaves
    if leaf.ndim and leaf.addressable_shards[0].data.nbytes * 8 != leaf.nbytes
  ]
  # Only Linen's own RMSNorm and the bias of its Dense are whole on each device,
  # because they have no axis names.
  assert {"RMSNorm" in path or "bias" in path for path in whole} == {True}
  codes = [leaf for _, leaf in leaves if leaf.dtype == E4M3]
  # Each of the two moments has codes for qkv, out, gate_up and down of two
  # layers, and for two vocabulary matrices.
  assert len(codes) == 2 * (2 * 4 + 2)


@pytest.mark.parametrize(
  "partitioned",
  [
    linen.with_partitioning,
    linen.with_logical_partitioning,
    nnx.bridge.with_partitioning,
  ],
  ids=["linen", "logical", "bridge"],
)
def test_linen_reads_the_axis_names_of_our_parameters(partitioned):
  init = linen.initializers.lecun_normal()
  model = nnx.bridge.to_linen(
    MLP,
    16,
    32,
    kernel_init=partitioned(init, ("data", "fsdp")),
    out_kernel_init=partitioned(init, ("fsdp", "data")),
  )
  mesh = jax.make_mesh(
    (2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2
  )
  with jax.set_mesh(mesh):
    x = jnp.ones((2, 3, 16), jnp.bfloat16)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
  specs = linen.get_partition_spec(variables)["params"]
  assert specs["gate_up"]["kernel"] == P("data", None, "fsdp")
  assert specs["down"]["kernel"] == P("fsdp", "data")
