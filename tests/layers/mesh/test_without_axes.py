# SPDX-License-Identifier: Apache-2.0
"""Tests layers on meshes of up to eight devices; recipes have no axes.

Each layer runs on common meshes, with automatic and with explicit axes.
Gradients must match those of one device, and must be sharded like their weights
and inputs.
"""

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import P
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from coat_jax import ops, recipes
from coat_jax.layers import (
  MLP,
  Attention,
  Heads,
  LayerNorm,
  Linear,
  NormLinear,
  RMSNorm,
  activate,
  dot_product_attention,
  rope,
  split_heads,
  with_weight_cache,
)
from coat_jax.ops.types import Unsupported
from tests.comparing import assert_close, jit
from tests.layers.attention_output import attention_output
from tests.layers.mesh.placing import (
  assert_sharded_like,
  bytes_of_device,
  normal,
  place,
)
from tests.matrices import quick

B, T, D, F, N, K = 8, 16, 64, 128, 8, 4
X = (B, T, D)
Q, KV, QKV = (B, T, N, 16), (B, T, K, 16), (B, T, (N + 2 * K) * 16)
POSITIONS = jnp.arange(T, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Case:
  """A layer to test: a module, or a function of arrays.

  Attributes:
    make: `make(recipe, **shared)` returns a module, or `make(recipe, *arrays)`
      computes the function.
    inputs: shapes of the layer's inputs.
    is_module: whether `make` returns a module.
    columns: number of trailing axes of the result that are columns of a weight.
  """

  make: Callable
  inputs: tuple[tuple[int, ...], ...] = (X,)
  is_module: bool = True
  columns: int = 0


def function(f, *inputs):
  return Case(f, inputs, is_module=False)


LAYERS = {
  "Linear": Case(lambda **a: Linear(D, (2, F), **a), columns=2),
  "RMSNorm": Case(lambda **a: RMSNorm(D, **a)),
  "LayerNorm": Case(lambda **a: LayerNorm(D, **a)),
  "NormLinear": Case(lambda **a: NormLinear(D, F, **a), columns=1),
  "UngatedMLP": Case(
    lambda **a: MLP(
      D, F, activation="gelu_tanh", gated=False, use_bias=True, **a
    )
  ),
  "MLP": Case(lambda **a: MLP(D, F, use_bias=True, **a)),
  "Attention": Case(
    lambda **a: Attention(D, N, num_kv_heads=K, clip_qkv=2.0, **a)
  ),
  "attention_output": function(
    lambda r, x, q, k, v, w: attention_output(x, q, k, v, w, recipe=r),
    *(X, Q, KV, KV, (N * 16, D)),
  ),
  "dot_product_attention": function(
    lambda r, q, k, v: dot_product_attention(q, k, v, recipe=r), Q, KV, KV
  ),
  "split_heads": function(
    lambda r, x: split_heads(x, POSITIONS, Heads(N, K, 1e4), recipe=r), QKV
  ),
  "rope": function(lambda r, q: rope(q, POSITIONS, theta=1e4), Q),
  "activate with up": function(
    lambda r, x, y: activate(x, y, activation="silu", recipe=r), X, X
  ),
  "activate": function(
    lambda r, x: activate(x, activation="gelu_tanh", recipe=r), X
  ),
}

RECIPES = {
  "coat": recipes.coat(),
  "all": recipes.coat(
    residuals="coat", attention="fp8", weight_cache="codes", group_size=32
  ),
  "fp8_linear": recipes.fp8_linear(),
  "bf16": recipes.bf16(),
}


@dataclasses.dataclass(frozen=True)
class Mesh:
  """A mesh, and which axes split which arrays.

  Attributes:
    sizes: number of devices along each axis.
    batch: axes that split sequences.
    rows, columns: axis that splits a weight's rows (or columns) to save memory,
      or None.
    tensor: axis that splits column- and row-parallel weights, or None.
  """

  sizes: dict[str, int]
  batch: tuple[str, ...] = ()
  rows: str | None = None
  columns: str | None = None
  tensor: str | None = None

  def make(self, kind: AxisType) -> jax.sharding.Mesh:
    sizes, names = tuple(self.sizes.values()), tuple(self.sizes)
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))

  def of_weight(self, path, w) -> P:
    """Returns a weight's spec; norms and output biases are replicated."""
    name = jax.tree_util.keystr(path)
    is_second = any(part in name for part in ("out", "down"))
    if "norm" in name or "scale" in name or w.ndim == 1 and is_second:
      return P()
    if "bias" in name:
      return P(*(None,) * (w.ndim - 1), self.tensor)
    if is_second:
      return P(_both(self.tensor, self.rows), self.columns)
    last = _both(self.tensor, self.columns)
    return P(self.rows, *(None,) * (w.ndim - 2), last)

  def of_input(self, x) -> P:
    if x.ndim == 2:  # A weight that is an argument of a function.
      return self.of_weight(("out",), x)
    heads = self.tensor if x.ndim == 4 or x.shape == QKV else None
    return P(self.batch or None, None, heads, *(None,) * (x.ndim - 3))


def _both(*names):
  return tuple(name for name in names if name) or None


MESHES = {
  "fsdp x tensor": Mesh(
    {"fsdp": 4, "tensor": 2}, ("fsdp",), rows="fsdp", tensor="tensor"
  ),
  "data": Mesh({"data": 8}, ("data",)),
  "fsdp": Mesh({"fsdp": 8}, ("fsdp",), rows="fsdp"),
  "fsdp by columns": Mesh({"fsdp": 8}, ("fsdp",), columns="fsdp"),
  "tensor": Mesh({"tensor": 4}, tensor="tensor"),
  "data x fsdp": Mesh({"data": 2, "fsdp": 4}, ("data", "fsdp"), rows="fsdp"),
  "data x tensor": Mesh({"data": 2, "tensor": 4}, ("data",), tensor="tensor"),
  # XLA's partitioner would compute wrong gradients without `unsplit_rows`.
  "data x fsdp x tensor": Mesh(
    {"data": 2, "fsdp": 2, "tensor": 2},
    ("data", "fsdp"),
    rows="fsdp",
    tensor="tensor",
  ),
}


def build(case: Case, recipe):
  """Returns (f, weights), where f(weights, inputs) runs the layer."""
  if not case.is_module:
    return (lambda weights, inputs: case.make(recipe, *inputs)), {}
  module = case.make(recipe=recipe, dtype=jnp.float32, rngs=nnx.Rngs(0))
  graph, params = nnx.split(module, nnx.Param)

  def f(weights, inputs):
    return with_weight_cache(nnx.merge(graph, weights))(*inputs)

  return f, nnx.to_pure_dict(params)


def value_and_gradients(f):
  def g(weights, inputs):
    y, vjp = jax.vjp(f, weights, inputs)
    return y, vjp(jax.tree.map(jnp.sin, y))

  return g


def cases():
  """Returns cases (layer, mesh, kind of axes, recipe).

  Each layer runs with the `coat` recipe on each mesh, and with each recipe on
  the first mesh. Kinds of axes alternate. So all pairs of values occur, except
  most pairs of mesh and recipe. Quick tests run one case of every second layer.
  """
  kinds = (AxisType.Explicit, AxisType.Auto)
  first, *_ = MESHES
  coat, *others = RECIPES
  places = [(mesh, coat) for mesh in MESHES]
  places += [(first, recipe) for recipe in others]
  found = []
  for i, layer in enumerate(LAYERS):
    found += quick(
      i % 2,  # Quick tests include norms, matmuls, MLPs and attention.
      [
        (layer, mesh, kinds[(i + j) % 2], recipe)
        for j, (mesh, recipe) in enumerate(places)
      ],
    )
  return found


# With f32 activations, FP8 codes are the same as on one device, because scales
# cover whole tensors. A different code in one operand would cause an error of
# 1e-3. Only the order of f32 sums differs. Sums of up to 128 values have an
# error of 128 * 2^-24 = 8e-6, and a layer computes a few such sums in sequence.
TOLERANCE = 5e-5


@functools.cache
def on_one_device(layer, recipe):
  f, weights = build(LAYERS[layer], RECIPES[recipe])
  return jit(value_and_gradients(f))(weights, normal(LAYERS[layer].inputs))


@pytest.mark.parametrize("layer, mesh, kind, recipe", cases())
def test_layer_on_a_mesh_matches_one_device(layer, mesh, kind, recipe):
  case, how = LAYERS[layer], MESHES[mesh]
  f, weights = build(case, RECIPES[recipe])
  inputs = normal(case.inputs)
  wanted = on_one_device(layer, recipe)

  mesh = how.make(kind)
  weights = place(mesh, how.of_weight, weights)
  inputs = place(mesh, lambda _, x: how.of_input(x), inputs)
  shardings = jax.tree.map(lambda x: x.sharding, (weights, inputs))
  given = {}
  if kind == AxisType.Auto:
    given = dict(in_shardings=shardings, out_shardings=(None, shardings))
  with jax.set_mesh(mesh):
    y, gradients = jit(value_and_gradients(f), **given)(weights, inputs)
  assert_close((y, gradients), wanted, TOLERANCE)
  assert_sharded_like(gradients, (weights, inputs))
  if kind == AxisType.Explicit and layer != "split_heads":
    columns = [None] * case.columns
    if columns:
      columns[-1] = how.tensor
    wanted = P(*how.of_input(inputs[0])[: y.ndim - len(columns)], *columns)
    wanted = NamedSharding(mesh, wanted)
    assert y.sharding.is_equivalent_to(wanted, y.ndim), y.sharding


def abstract(sizes, kind=AxisType.Explicit):
  """Returns an abstract mesh of H200s."""
  device = AbstractDevice("H200", 132, "cuda")
  kinds = (kind,) * len(sizes)
  return AbstractMesh(
    tuple(sizes.values()), tuple(sizes), kinds, abstract_device=device
  )


# Matches the primitives that call kernels.
CALLS = re.compile("pallas_call|mpmd_map")


def traced(case, how, kind=AxisType.Explicit, recipe=RECIPES["coat"]):
  """Returns the program of a layer and its gradients for H200s, as text."""
  f, weights = build(case, recipe)

  def g(weights, inputs):
    put = lambda spec, x: jax.sharding.reshard(x, spec)  # noqa: E731
    if kind == AxisType.Explicit:
      specs = jax.tree.map_with_path(how.of_weight, weights)
      weights = jax.tree.map(put, specs, weights)
      inputs = tuple(put(how.of_input(x), x) for x in inputs)
    return value_and_gradients(f)(weights, inputs)

  arrays = jax.eval_shape(lambda: (weights, normal(case.inputs)))
  with jax.sharding.use_abstract_mesh(abstract(how.sizes, kind)):
    return str(jax.make_jaxpr(g)(*arrays))


@pytest.mark.parametrize("mesh", quick(1, ["fsdp", "data", "data x fsdp"]))
def test_kernels_run_on_explicit_data_and_fsdp_axes(mesh):
  how = MESHES[mesh]
  program = traced(LAYERS["MLP"], how)
  assert CALLS.search(program)
  # With FSDP, codes of two weights are gathered in each of the two passes.
  gathers = re.findall(r":f8_e4m3fn\S* = all_gather\[", program)
  assert len(gathers) == (4 if how.rows else 0)


def test_kernels_do_not_run_where_xla_partitions():
  case = LAYERS["MLP"]
  assert not CALLS.search(traced(case, MESHES["data x tensor"]))
  assert not CALLS.search(traced(case, MESHES["fsdp"], AxisType.Auto))
  x, how = jnp.ones((16, 64)), dict(implementation="mosaic")
  with jax.sharding.use_abstract_mesh(abstract({"data": 2})):
    with pytest.raises(Unsupported, match="layers use if recipe.axes"):
      jax.eval_shape(functools.partial(ops.tensor_scale, **how), x)


def bytes_saved(how, case):
  """Counts bytes that a device saves for the backward pass, except weights."""
  f, weights = build(case, RECIPES["coat"])

  def saved(weights, inputs):
    return jax.tree.leaves(jax.vjp(f, weights, inputs)[1])

  if how is None:
    arrays = jax.jit(saved)(weights, normal(case.inputs))
  else:
    mesh = how.make(AxisType.Explicit)
    weights = place(mesh, how.of_weight, weights)
    inputs = place(mesh, lambda _, x: how.of_input(x), normal(case.inputs))
    with jax.set_mesh(mesh):
      arrays = jax.jit(saved)(weights, inputs)
  shapes = {w.shape for w in jax.tree.leaves(weights)}
  return sum(bytes_of_device(x) for x in arrays if x.shape not in shapes)


@pytest.mark.parametrize(
  "mesh, share", quick(1, [("data x tensor", 1 / 8), ("fsdp", 1 / 8)])
)
def test_a_device_saves_its_share(mesh, share):
  case = Case(lambda **a: MLP(D, 16 * D, **a))
  # All saved arrays are split, except that devices along `tensor` have copies
  # of x, which has only D columns. Gate and up have 2 * 16 * D columns.
  copies = B * T * D / 2
  found = bytes_saved(MESHES[mesh], case)
  assert share * bytes_saved(None, case) <= found * 1.01
  assert found <= share * bytes_saved(None, case) + copies
