# SPDX-License-Identifier: Apache-2.0
"""Tests parameters: initializers, metadata, and sharding by metadata."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from jax import P
from jax.sharding import AxisType, NamedSharding

from coat_jax import coat_adamw, recipes
from coat_jax.layers import (
  MLP,
  Attention,
  LayerNorm,
  Linear,
  NormLinear,
  RMSNorm,
  with_weight_cache,
)
from coat_jax.optimizer import state_shardings
from tests.comparing import assert_close, assert_same_bits, jit
from tests.matrices import quick

D = 16
INIT = nnx.initializers.lecun_normal()
NORMAL = nnx.initializers.normal(1.0)
KINDS = {
  "auto": (AxisType.Auto,) * 2,
  "explicit": (AxisType.Explicit,) * 2,
}
UNGATED = functools.partial(MLP, activation="gelu_tanh", gated=False)
MODULES = {
  "Linear": (Linear, (D, 32)),
  "RMSNorm": (RMSNorm, (D,)),
  "LayerNorm": (LayerNorm, (D,)),
  "NormLinear": (NormLinear, (D, 32)),
  "MLP": (MLP, (D, 32)),
  "UngatedMLP": (UNGATED, (D, 32)),
  "Attention": (Attention, (D, 4)),
}


def make_mesh(kind="auto"):
  return jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=KINDS[kind])


def make(name, **options):
  module, sizes = MODULES[name]
  return module(*sizes, rngs=nnx.Rngs(0), **options)


def at(*names):
  return {"out_sharding": names}


# Initializers -------------------------------------------------------------


@pytest.mark.parametrize(
  "ours, theirs, names",
  [
    (Linear, nnx.Linear, ("kernel_init", "bias_init")),
    (RMSNorm, nnx.RMSNorm, ("scale_init",)),
    (LayerNorm, nnx.LayerNorm, ("scale_init", "bias_init")),
  ],
)
def test_initializers_give_the_same_values_as_in_flax(ours, theirs, names):
  sizes = (D, 32) if ours is Linear else (D,)
  inits = dict.fromkeys(names, NORMAL)
  got = nnx.state(ours(*sizes, rngs=nnx.Rngs(0), **inits))
  want = nnx.state(theirs(*sizes, rngs=nnx.Rngs(0), **inits))
  assert jax.tree.structure(got) == jax.tree.structure(want)
  assert_same_bits(got, want)


def test_each_parameter_has_its_own_initializer():
  def constant(value):
    return nnx.initializers.constant(value)

  options = dict(
    kernel_init=constant(1.0),
    bias_init=constant(2.0),
    out_kernel_init=constant(3.0),
    out_bias_init=constant(4.0),
    scale_init=constant(5.0),
    norm_bias_init=constant(6.0),
  )
  block = make("UngatedMLP", use_bias=True, use_norm_bias=True, **options)
  got = jax.tree.map(lambda x: float(x.max()), nnx.as_pure(nnx.state(block)))
  assert got == {
    "norm": {"scale": 5.0, "bias": 6.0},
    "up": {"kernel": 1.0, "bias": 2.0},
    "down": {"kernel": 3.0, "bias": 4.0},
  }
  # As in nnx.MultiHeadAttention, out_kernel_init and out_bias_init default to
  # kernel_init and bias_init.
  del options["out_kernel_init"], options["out_bias_init"]
  block = make("MLP", use_bias=True, **options)
  assert float(block.down.kernel[0, 0]) == 1.0
  assert float(block.down.bias[0]) == 2.0


# Metadata -----------------------------------------------------------------

# Half of the metadata comes from initializers, half from metadata arguments.
OF_NORM = dict(
  norm="layer",
  use_norm_bias=True,
  scale_metadata=at("data"),
  norm_bias_init=nnx.with_partitioning(nnx.initializers.zeros, ("fsdp",)),
)
OF_FRONT = dict(
  use_bias=True,
  kernel_init=nnx.with_partitioning(INIT, ("data", "fsdp")),
  bias_metadata=at("fsdp"),
)
OF_BACK = dict(
  out_kernel_init=INIT,
  out_kernel_metadata=at("fsdp", "data"),
  out_bias_init=nnx.with_partitioning(nnx.initializers.zeros, ("data",)),
)
NORM_SPECS = {"scale": P("data"), "bias": P("fsdp")}
FRONT_SPECS = {"kernel": P("data", "fsdp"), "bias": P("fsdp")}
BACK_SPECS = {"kernel": P("fsdp", "data"), "bias": P("data")}
WITH_METADATA = {
  "Linear": (OF_FRONT, FRONT_SPECS),
  "RMSNorm": (dict(scale_metadata=at("fsdp")), {"scale": P("fsdp")}),
  "LayerNorm": (
    dict(
      scale_init=nnx.with_partitioning(nnx.initializers.ones, ("data",)),
      bias_metadata=at("fsdp"),
    ),
    NORM_SPECS,
  ),
  "NormLinear": (
    OF_NORM | OF_FRONT,
    {"norm": NORM_SPECS, "linear": FRONT_SPECS},
  ),
  "MLP": (
    OF_NORM | OF_FRONT | OF_BACK,
    {
      "norm": NORM_SPECS,
      # The middle axis selects gate or up, and has no name.
      "gate_up": {
        "kernel": P("data", None, "fsdp"),
        "bias": P(None, "fsdp"),
      },
      "down": BACK_SPECS,
    },
  ),
  "UngatedMLP": (
    OF_NORM | OF_FRONT | OF_BACK,
    {"norm": NORM_SPECS, "up": FRONT_SPECS, "down": BACK_SPECS},
  ),
  "Attention": (
    OF_NORM | OF_FRONT | OF_BACK,
    {"qkv": {"norm": NORM_SPECS, "linear": FRONT_SPECS}, "out": BACK_SPECS},
  ),
}


def stack(name, options, num_layers):
  """Builds a module, or stacks the parameters of `num_layers` modules."""
  if num_layers is None:
    return make(name, **options)
  module, sizes = MODULES[name]

  @nnx.split_rngs(splits=num_layers)
  @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
  def stacked(rngs):
    return module(*sizes, rngs=rngs, **options)

  return stacked(nnx.Rngs(0))


@pytest.mark.parametrize("num_layers", [None, 3])
@pytest.mark.parametrize("name", MODULES)
def test_metadata_of_every_parameter_is_kept(name, num_layers):
  options, specs = WITH_METADATA[name]
  with jax.set_mesh(make_mesh()):
    module = nnx.eval_shape(lambda: stack(name, options, num_layers))
  got = nnx.as_pure(nnx.get_partition_spec(nnx.state(module)))
  if num_layers is not None:
    specs = jax.tree.map(lambda spec: P(None, *spec), specs)
  assert got == specs


@pytest.mark.parametrize(
  "name, num_layers, kind",
  quick(
    len(MODULES) + 1,
    [
      *((name, None, "auto") for name in MODULES),
      ("MLP", 3, "explicit"),
      *((name, None, "explicit") for name in MODULES),
      *((name, 3, "auto") for name in MODULES),
      *((name, 3, "explicit") for name in MODULES if name != "MLP"),
    ],
  ),
)
def test_parameters_are_created_sharded(name, num_layers, kind):
  options, specs = WITH_METADATA[name]
  mesh = make_mesh(kind)
  with jax.set_mesh(mesh):
    module = nnx.jit(lambda: stack(name, options, num_layers))()
  params = jax.tree.leaves(nnx.state(module))
  specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
  for param, spec in zip(params, specs, strict=True):
    share = math.prod(mesh.shape[axis] for axis in spec if axis)
    assert share > 1
    for shard in param.addressable_shards:
      assert shard.data.nbytes * share == param.nbytes
  names = {name for name in options if name.endswith("metadata")}
  plain = {k: v for k, v in options.items() if k not in names}
  plain |= {k: INIT for k in plain if k.endswith("kernel_init")}
  plain |= {k: nnx.initializers.zeros for k in plain if "bias_init" in k}
  if "scale_init" in plain:
    plain["scale_init"] = nnx.initializers.ones
  alone = nnx.jit(lambda: stack(name, plain, num_layers))()
  assert_same_bits(params, nnx.state(alone))


def test_metadata_without_axis_names_is_kept():
  layer = make("Linear", kernel_metadata={"role": "projection"})
  assert layer.kernel.role == "projection"


def test_names_of_several_output_axes_match_flax():
  options = dict(
    kernel_init=nnx.with_partitioning(INIT, ("data", None, "fsdp")),
    bias_metadata=at(None, "fsdp"),
  )

  def specs(module):
    with jax.set_mesh(make_mesh()):
      made = nnx.eval_shape(
        lambda: module(D, (2, 32), rngs=nnx.Rngs(0), **options)
      )
    return nnx.as_pure(nnx.get_partition_spec(nnx.state(made)))

  assert specs(Linear) == specs(nnx.LinearGeneral)
  assert specs(Linear)["kernel"] == P("data", None, "fsdp")


def test_gate_up_kernel_accepts_a_name_for_each_axis():
  with jax.set_mesh(make_mesh()):
    block = nnx.eval_shape(
      lambda: make(
        "MLP",
        kernel_metadata=at("data", None, "fsdp"),
        out_kernel_metadata=at("fsdp"),
      )
    )
  spec = nnx.get_partition_spec(nnx.state(block))["gate_up"]["kernel"]
  assert spec.get_value() == P("data", None, "fsdp")


def test_more_names_than_axes_are_refused():
  with pytest.raises(
    ValueError, match=r"one entry for each axis, .* \(16, 32\)"
  ):
    make("Linear", kernel_metadata=at("data", None, "fsdp"))


@pytest.mark.parametrize(
  "partitioned", [linen.with_partitioning, linen.with_logical_partitioning]
)
def test_linen_boxes_set_metadata(partitioned):
  """Creates parameters without a mesh, which Linen allows too."""
  init = partitioned(INIT, ("data", "fsdp"))
  layer = make("Linear", kernel_init=init)
  assert layer.kernel.out_sharding == ("data", "fsdp")
  assert_same_bits(layer.kernel[...], make("Linear").kernel[...])
  back = nnx.bridge.variables.to_linen_var(layer.kernel)
  assert type(back) is type(init(jax.random.key(0), (D, 32)))
  assert back.names == ("data", "fsdp")


def test_optimizer_state_follows_the_metadata():
  options, _ = WITH_METADATA["MLP"]
  mesh = make_mesh()
  with jax.set_mesh(mesh):
    block = nnx.eval_shape(lambda: MLP(256, 512, rngs=nnx.Rngs(0), **options))
  graph, params = nnx.split(block, nnx.Param)

  def state_of(params):
    model = nnx.merge(graph, params)
    return nnx.state(nnx.Optimizer(model, coat_adamw(1e-3), wrt=nnx.Param))

  where = state_shardings(
    state_of, params, nnx.get_named_sharding(params, mesh)
  )
  adam = nnx.as_pure(where)["opt_state"][0]
  for moment in ("mu", "nu"):
    for field in ("codes", "amax"):
      kernel = adam[moment][field]["gate_up"]["kernel"]
      assert kernel == NamedSharding(mesh, P("data", None, "fsdp")), field


@pytest.mark.slow
def test_scanned_layers_with_metadata_match_one_device():
  """Caches the weights before the scan, and compares gradients."""
  meta = {nnx.PARTITION_NAME: None}
  rows = dict(kernel_init=nnx.with_partitioning(INIT, ("fsdp",)))

  def gradients(options, x):
    layers = stack("MLP", dict(options, recipe=recipes.coat()), 3)
    graph, params = nnx.split(layers)

    def loss(params):
      layers = with_weight_cache(nnx.merge(graph, params))
      forward = nnx.scan(
        lambda x, layer: layer(x),
        in_axes=(nnx.Carry, 0),
        out_axes=nnx.Carry,
        transform_metadata=meta,
      )
      return jnp.mean(forward(x, layers).astype(jnp.float32) ** 2)

    return jax.grad(loss)(params)

  x = jax.random.normal(jax.random.key(1), (8, 4, D), jnp.bfloat16)
  want = jit(lambda x: gradients({}, x))(x)
  mesh = make_mesh()
  with jax.set_mesh(mesh):
    got = jit(lambda x: gradients(rows, x))(
      jax.device_put(x, NamedSharding(mesh, P(("data", "fsdp"))))
    )
  assert_close(got, want, 2.0**-7)
