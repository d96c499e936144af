# SPDX-License-Identifier: Apache-2.0
"""Makes FP8 layers and blocks that keep the parameters of a user's modules.

`convert_layer` makes an FP8 layer with the options of a Flax layer. For a
user's own module, `fuse` searches for a block that computes the same output:
both run in f32 with the same random parameters and tokens. The search covers
all orders of the linear layers, all activations, blocks with and without a
gate, and blocks with and without the residual add.
"""

import dataclasses
import inspect
import itertools
import math
from collections.abc import Iterable
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from coat_jax import ops, recipes
from coat_jax.layers.block import BlockWeights, block
from coat_jax.layers.block_module import NormLinear
from coat_jax.layers.linear import Linear, norm_linear
from coat_jax.layers.mlp import MLP, Elementwise
from coat_jax.layers.module import RecipeModule, value_of
from coat_jax.layers.norm import (
  LayerNorm,
  Norm,
  RMSNorm,
  norm_options,
  weights_of_norm,
)
from coat_jax.layers.product import LinearWeights
from coat_jax.layers.residuals import RESIDUAL_NAMES
from coat_jax.recipes import CoatRecipe

COUNTERPARTS: dict[type, type[RecipeModule]] = {
  nnx.Linear: Linear,
  nnx.LinearGeneral: Linear,
  nnx.RMSNorm: RMSNorm,
  nnx.LayerNorm: LayerNorm,
}
_PARAMETERS = ("kernel", "scale", "bias")
# `use_fast_variance` is ignored: our norms always use the accurate formula.
_IGNORED = {"self", "rngs", "use_fast_variance"}

BLOCKS = (MLP, NormLinear)
# In sums of up to 10,000 f32 products, a different order of addition causes a
# relative difference of 1e-6. The most similar activations, "gelu" and
# "gelu_tanh", differ by 1e-4.
_TOLERANCE = 1e-5
_TOKENS = 8


def convert_layer(module: Any, recipe: CoatRecipe) -> RecipeModule:
  """Makes an FP8 layer from a Flax layer, with the same parameters.

  Raises a ValueError with a reason if the FP8 layer cannot replace it.
  """
  kind = type(module)
  for name, value in vars(module).items():
    if isinstance(value, nnx.Pytree | nnx.Variable) and name not in _PARAMETERS:
      raise ValueError(
        f"{kind.__name__}: it holds `{name}`, which the FP8 layer would lose"
      )
  parameters = inspect.signature(kind.__init__).parameters
  options = {x: getattr(module, x) for x in parameters if hasattr(module, x)}
  new_kind: Any = COUNTERPARTS[kind]
  if kind is nnx.LinearGeneral:
    axes = options.pop("axis")
    if axes != tuple(range(-len(axes), 0)):
      raise _refused(kind, "axis", axes)
    if len(axes) == 1:
      (options["in_features"],) = module.in_features
  ours = inspect.signature(new_kind.__init__).parameters
  for name in options.keys() - ours.keys() - _IGNORED:
    value = options[name]
    if value is not (default := parameters[name].default) and value != default:
      raise _refused(kind, name, value)
  options = {k: v for k, v in options.items() if k in ours and k != "rngs"}
  make = lambda: new_kind(recipe=recipe, **options, rngs=nnx.Rngs(0))  # noqa: E731
  new = nnx.eval_shape(make)
  for name in _PARAMETERS:
    if (param := getattr(module, name, None)) is None:
      continue
    shape = getattr(new, name).shape
    if param.shape[len(param.shape) - len(shape) :] != shape:
      raise ValueError(
        f"{kind.__name__}: {name} must have the shape {shape} after the axes "
        f"of stacked layers, got {param.shape}; stack layers along the first "
        "axis"
      )
    setattr(new, name, param)
  return new


def _refused(kind: type, name: str, value: Any) -> ValueError:
  return ValueError(
    f"{kind.__name__}: {name} must be left out, got {value!r}: the FP8 layer "
    "does not support it"
  )


@dataclasses.dataclass(frozen=True)
class Roles:
  """A block's options, and its parts' attribute names in the user's module."""

  width: int
  norm: str | None
  front: tuple[str, ...]
  back: str | None = None
  middle: Elementwise | None = None  # None for a NormLinear.
  add_input: bool = False


class FusedBlock(nnx.Module):
  """A block with all attributes of the user's module that it replaces."""

  def __init__(self, module: nnx.Module, roles: Roles):
    for name, value in vars(module).items():
      if name.startswith("_pytree__"):
        continue
      leaves = jax.tree.leaves(value, is_leaf=is_node)
      is_container = not is_node(value) and any(map(is_node, leaves))
      setattr(self, name, nnx.data(value) if is_container else value)
    self.roles = roles

  def __call__(self, x: Array) -> Array:
    """Runs the block on [..., features]."""
    roles = self.roles
    norm: Norm | None = getattr(self, roles.norm) if roles.norm else None
    fronts: list[Linear] = [getattr(self, name) for name in roles.front]
    back: Linear | None = getattr(self, roles.back) if roles.back else None
    recipe = fronts[0].active_recipe
    x = fronts[0].cast(x, fronts[0].kernel, fronts[0].bias)
    gamma, beta = weights_of_norm(norm)

    def run(x, gamma, beta, kernels, biases, out):
      front = LinearWeights(*_joined(kernels, biases, roles), gamma, beta)
      how: Any = norm_options(norm) | dict(recipe=recipe)
      if roles.middle is None:
        return norm_linear(x, front, **how)
      weights = BlockWeights(front, LinearWeights(*out))
      how |= dict(middle=roles.middle, add_input=roles.add_input)
      return block(x, weights, **how)

    if len(fronts) > 1 and recipe.nonlinear == "fp8":
      # Recompute the joined copy of the gate and up kernels; don't save it.
      policy = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
      run = jax.checkpoint(run, policy=policy)
    return run(
      x,
      gamma,
      beta,
      [part.weight for part in fronts],
      [value_of(part.bias) for part in fronts],
      (back.weight, value_of(back.bias)) if back else (),
    )


def _joined(kernels, biases, roles: Roles) -> tuple[Array, Array | None]:
  """Returns the front's kernel and bias; with a gate, [D, 2, F] and [2, F]."""
  if len(kernels) > 1:
    bias = None if biases[0] is None else jnp.stack(biases)
    return jnp.stack(kernels, axis=1), bias
  (w,), (bias,) = kernels, biases
  if roles.middle is not None and roles.middle.gated:
    w = w.reshape(w.shape[0], 2, -1)
    bias = None if bias is None else bias.reshape(2, -1)
  return w, bias


def is_node(x: Any) -> bool:
  """Returns whether x is a module or a container of modules."""
  return isinstance(x, nnx.Pytree)


def parts_of(module: nnx.Module) -> dict[str, Any]:
  """Returns the modules that are direct attributes, by name."""
  attributes = vars(module).items()
  return {k: v for k, v in attributes if isinstance(v, nnx.Module)}


def fuse(
  original: nnx.Module,
  module: nnx.Module,
  ours: type,
  known: dict[Any, Roles],
) -> FusedBlock:
  """Makes a block from `module`, the copy of `original` with converted parts.

  Raises a ValueError with a reason if no block of the class `ours` computes the
  same output. `known` caches the roles of modules with the same structure.
  """
  _check_state(original, ours)
  for name, part in parts_of(module).items():
    if not isinstance(part, Norm | Linear | nnx.Dropout):
      raise ValueError(
        f"it cannot become {ours.__name__}: `{name}` was not replaced"
      )
  shapes = tuple(x.shape for x in jax.tree.leaves(nnx.state(original)))
  key: Any = (ours, nnx.graphdef(original), shapes)
  try:
    hash(key)
  except TypeError:  # Some attribute is not hashable.
    key = object()
  if key not in known:
    known[key] = _roles_of(original, ours)
  return FusedBlock(module, known[key])


def _check_state(original: nnx.Module, ours: type) -> None:
  """Raises a ValueError if a block would lose variables or dropout."""
  covered = set()
  for name, part in parts_of(original).items():
    if isinstance(part, nnx.Dropout) and part.rate:
      raise ValueError(
        f"it cannot become {ours.__name__}: `{name}` drops {part.rate} of the "
        "values, and FP8 layers have no dropout"
      )
    covered |= {id(x) for _, x in nnx.iter_graph(part) if _is_variable(x)}
  found = {id(x) for _, x in nnx.iter_graph(original) if _is_variable(x)}
  if found - covered:
    raise ValueError(
      f"it cannot become {ours.__name__}: it has variables outside its linear "
      "layers and norms"
    )


def _is_variable(x: Any) -> bool:
  return isinstance(x, nnx.Variable)


def _roles_of(original: nnx.Module, ours: type) -> Roles:
  """Finds the block that computes the original's output, or raises."""
  candidates = list(_candidates(original, ours))
  if not candidates:
    raise ValueError(
      f"it cannot become {ours.__name__}: its linear layers and norms differ "
      "from the block's in number, width or bias"
    )
  with (
    jax.ensure_compile_time_eval(),
    jax.default_matmul_precision("highest"),
  ):
    reference = _with_random_parameters(original)
    outputs, failure = {}, None
    for width in {roles.width for roles in candidates}:
      x = jax.random.normal(jax.random.key(0), (1, _TOKENS, width))
      try:
        outputs[width] = x, reference(x)
      except Exception as error:  # A user's module may raise anything.
        failure = error
    if not outputs:
      raise ValueError(
        f"it must be callable with one array [..., features]: {failure}"
      ) from failure
    for name, part in parts_of(reference).items():
      if not isinstance(part, nnx.Dropout):
        setattr(reference, name, convert_layer(part, recipes.bf16()))
    errors = {
      roles: _error(FusedBlock(reference, roles)(x), y)
      for width, (x, y) in outputs.items()
      for roles in candidates
      if roles.width == width
    }
  best = min(errors, key=lambda roles: errors[roles])
  if not errors[best] <= _TOLERANCE:
    raise ValueError(
      f"it cannot become {ours.__name__}: with random parameters, its output "
      f"differs by {errors[best]:.1e} from the most similar block's, relative "
      "to the largest value"
    )
  return best


def _error(got: Array, want: Any) -> float:
  if not isinstance(want, Array) or got.shape != want.shape:
    return math.inf
  difference = jnp.max(jnp.abs(got - want.astype(got.dtype)))
  return float(difference / jnp.max(jnp.abs(want)))


def _with_random_parameters(module: nnx.Module) -> Any:
  """Copies a module, or one layer of a stack, with random f32 parameters."""
  stacked = next(
    part.kernel.ndim - len(_sizes(part, "in") + _sizes(part, "out"))
    for part in parts_of(module).values()
    if isinstance(part, nnx.Linear | nnx.LinearGeneral)
  )
  graph, params, others = nnx.split(module, nnx.Param, ...)
  leaves, tree = jax.tree.flatten(params)

  def draw(i, leaf):
    shape = leaf.shape[stacked:]
    x = jax.random.normal(jax.random.key(i + 1), shape)
    # Scales of 1 or biases of 0 would not affect the output.
    return 0.5 + x if len(shape) == 1 else x / math.sqrt(shape[0])

  drawn = [draw(i, leaf) for i, leaf in enumerate(leaves)]
  copy: Any = nnx.merge(graph, jax.tree.unflatten(tree, drawn), others)
  for part in (copy, *parts_of(copy).values()):
    if hasattr(part, "dtype"):
      part.dtype = jnp.float32
  return copy


def _sizes(part: Any, side: str) -> tuple[int, ...]:
  sizes = getattr(part, f"{side}_features")
  return sizes if isinstance(sizes, tuple) else (sizes,)


def _candidates(original: nnx.Module, ours: type) -> Iterable[Roles]:
  """Yields the roles that fit the widths of a module's parts."""
  parts = parts_of(original)
  linears = [k for k, v in parts.items() if hasattr(v, "in_features")]
  norms = [k for k, v in parts.items() if hasattr(v, "num_features")]
  if len(norms) > 1:
    return
  norm = norms[0] if norms else None
  if ours is NormLinear:
    if norm and [len(_sizes(parts[x], "out")) for x in linears] == [1]:
      width: int = parts[norm].num_features
      yield Roles(width, norm, tuple(linears))
    return
  if len(linears) not in (2, 3):
    return
  choices = get_args(ops.Activation), (True, False), (True, False)
  for *front, back in itertools.permutations(linears):
    (width, *others) = _sizes(parts[back], "out")
    if others or norm and parts[norm].num_features != width:
      continue
    for activation, gated, add_input in itertools.product(*choices):
      if _fits([parts[name] for name in front], parts[back], gated):
        middle = Elementwise(activation, gated)
        yield Roles(width, norm, tuple(front), back, middle, add_input)


def _fits(front: list[Any], back: Any, gated: bool) -> bool:
  """Returns whether these linear layers' widths and biases fit a block."""
  ends = _sizes(front[0], "in"), _sizes(back, "out")
  inside = {math.prod(_sizes(part, "out")) for part in front}
  hidden = math.prod(_sizes(back, "in"))
  is_joined = gated and len(front) == 1
  if is_joined:
    hidden *= 2
  return (
    (gated or len(front) == 1)
    and (is_joined or all(len(_sizes(part, "out")) == 1 for part in front))
    and inside == {hidden}
    and {_sizes(part, "in") for part in front} == {ends[1]} == {ends[0]}
    and len({part.bias is None for part in front}) == 1
  )
