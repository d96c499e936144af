# SPDX-License-Identifier: Apache-2.0
"""Converts an existing Flax NNX model to FP8 layers, and reports the changes.

`converted.py` makes the new layers and blocks.
"""

import collections
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx

from coat_jax.layers.block_module import NormLinear
from coat_jax.layers.converted import (
  BLOCKS,
  COUNTERPARTS,
  FusedBlock,
  convert_layer,
  fuse,
  is_node,
  parts_of,
)
from coat_jax.layers.count import saved_bytes
from coat_jax.layers.linear import Linear
from coat_jax.layers.mlp import MLP
from coat_jax.layers.module import RecipeModule, recipe_of
from coat_jax.numerics.checks import check_kind, refuse
from coat_jax.recipes import CoatRecipe

type BlockType = type[MLP | NormLinear]


@dataclasses.dataclass(frozen=True)
class ConversionReport:
  """Result of `convert`; `print(report)` shows it as text.

  Attributes:
    replaced: maps the path of each replaced module or block to its new class.
    left: the reasons why modules were not replaced, keyed by their paths. Lists
      only modules that hold variables directly or whose class is in `blocks`.
    matmuls_only: classes whose linear layers were replaced one by one. The
      activations between these layers are saved as before.
    saved_before, saved_after: bytes that the model saves for its backward pass,
      excluding parameters, before and after the conversion; None without
      `inputs`.
  """

  replaced: Mapping[str, str]
  left: Mapping[str, str]
  matmuls_only: tuple[str, ...]
  saved_before: int | None = None
  saved_after: int | None = None

  def __str__(self) -> str:
    """Lists what was replaced, what was left and why, and the saved bytes."""
    counts = collections.Counter(self.replaced.values())
    each = [f"{count} {name}" for name, count in sorted(counts.items())]
    lines = [f"replaced: {', '.join(each) or 'nothing'}"]
    lines += [f"left {path}: {why}" for path, why in self.left.items()]
    if self.matmuls_only:
      lines.append(
        f"matmuls only: {', '.join(self.matmuls_only)}; activations between "
        "matmuls are saved as before; if a class computes a whole block, name "
        "it in `blocks`"
      )
    before, after = self.saved_before, self.saved_after
    if before is not None and after is not None:
      share = f" ({after / before:.0%})" if before else ""
      lines.append(
        f"stored for the backward pass: {before:,} bytes before the "
        f"conversion, {after:,} after it{share}"
      )
    return "\n".join(lines)


def convert[Module: nnx.Module](
  model: Module,
  recipe: CoatRecipe | None = None,
  *,
  blocks: Mapping[type[nnx.Module], BlockType] = MappingProxyType({}),
  inputs: tuple[Any, ...] | None = None,
) -> tuple[Module, ConversionReport]:
  """Replaces the layers of a Flax NNX model with FP8 layers.

  Each `nnx.Linear`, `nnx.LinearGeneral`, `nnx.RMSNorm` and `nnx.LayerNorm` is
  replaced if FP8 layers support its options. `convert` does not change the
  model. It returns a copy that shares the `nnx.Param` objects with the model,
  so training the copy updates the model's parameters too. The paths,
  shapes, dtypes and metadata in `nnx.state` do not change, so checkpoints,
  optimizers and shardings remain valid.

  If one of your classes computes a whole block, name it in `blocks`: replacing
  whole blocks saves the most memory. `convert` runs a module of the class with
  random parameters on a few random tokens in f32. It replaces the module only
  if an `MLP` (or `NormLinear`), with one of the supported activations, computes
  the same output. Separate gate and up projections stay separate parameters.

  Example usage::

    >>> from coat_jax import layers, recipes
    >>> from flax import nnx
    >>> import jax
    >>> import jax.numpy as jnp

    >>> class FeedForward(nnx.Module):
    ...   def __init__(self, rngs):
    ...     self.norm = nnx.RMSNorm(64, rngs=rngs)
    ...     self.wi = nnx.Linear(64, 256, rngs=rngs)
    ...     self.wo = nnx.Linear(256, 64, rngs=rngs)
    ...
    ...   def __call__(self, x):
    ...     return x + self.wo(nnx.gelu(self.wi(self.norm(x))))

    >>> model, report = layers.convert(
    ...   FeedForward(nnx.Rngs(0)),
    ...   recipes.coat(),
    ...   blocks={FeedForward: layers.MLP},
    ...   inputs=(jax.ShapeDtypeStruct((1, 512, 64), jnp.bfloat16),),
    ... )
    >>> print(report.replaced)
    {'.': 'MLP'}
    >>> report.saved_after < report.saved_before / 3
    True

  Args:
    model: the model; its arrays may be abstract (from `nnx.eval_shape`).
    recipe: selects what is computed and saved in FP8; None for
      `recipes.coat()`.
    blocks: maps your classes that compute a whole block to `MLP` or
      `NormLinear`. A class that is mapped to `MLP` may lack the norm or the
      residual add. Modules of these classes must accept a single array.
    inputs: example arguments for the model, arrays or `jax.ShapeDtypeStruct`s.
      If they are given, the model is traced (but not run), and the report
      contains the number of bytes saved for the backward pass.

  Returns:
    The converted copy, and a report.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: a key of `blocks` is not a class of your own that the model
      contains, a value of `blocks` is not `MLP` or `NormLinear`, or modules
      contain each other.
  """
  op = "convert"
  remedy = "pass a model or a layer of Flax NNX"
  check_kind(op, "model", model, nnx.Module, remedy)
  recipe = recipe_of(op, recipe)
  _check_blocks(op, blocks, model)
  if inputs is not None:
    check_kind(op, "inputs", inputs, tuple, "pass a tuple, as in inputs=(x,)")
  converter = _Converter(recipe, blocks)
  new = converter.convert(model)
  saved = [saved_bytes(m, inputs) for m in (model, new) if inputs is not None]
  return new, ConversionReport(
    converter.replaced,
    converter.left,
    tuple(converter.matmuls_only),
    *saved,
  )


def _check_blocks(op: str, blocks: Any, model: nnx.Module) -> None:
  remedy = "pass {Block: layers.MLP}, where Block is a class in your model"
  check_kind(op, "blocks", blocks, Mapping, remedy)
  classes = {type(module) for _, module in nnx.iter_modules(model)}
  for theirs, ours in blocks.items():
    if not isinstance(theirs, type):
      refuse(TypeError, op, "keys of blocks", "classes", theirs, remedy)
    if theirs not in classes or theirs in COUNTERPARTS:
      rule, name = "classes of your own in the model", "keys of blocks"
      remedy = "pass type(module) of a module that computes a block"
      refuse(ValueError, op, name, rule, theirs, remedy)
    if ours not in BLOCKS:
      rule, name = "MLP or NormLinear", "values of blocks"
      refuse(ValueError, op, name, rule, ours, "pass one of these classes")


class _Converter:
  """Replaces modules in a copy of a model, and records the changes."""

  def __init__(self, recipe: CoatRecipe, blocks: Mapping[type, type]):
    self.recipe, self.blocks = recipe, blocks
    self.replaced: dict[str, str] = {}
    self.left: dict[str, str] = {}
    self.matmuls_only: list[str] = []
    self.roles: dict[Any, Any] = {}
    # Keep each node alive, so that no other node gets its id.
    self._new: dict[int, tuple[Any, Any]] = {}

  def convert(self, model: nnx.Module) -> Any:
    """Returns a converted copy; children are converted before their parents."""
    copies = _nodes(nnx.clone(model, variables=False))
    for (path, node), (_, original) in zip(copies, _nodes(model), strict=True):
      self._replace_children(path, node)
      new = node
      if isinstance(node, nnx.Module):
        new = self._convert(_name(path), node, original)
      self._new[id(node)] = node, new
    return self._new[id(copies[-1][1])][1]

  def _replace_children(self, path: tuple, node: Any) -> None:
    """Replaces a node's children, even in containers, with converted ones."""
    for key, value in list(vars(node).items()):
      leaves, tree = jax.tree.flatten(value, is_leaf=_is_leaf)
      if key.startswith("_pytree__") or not any(map(is_node, leaves)):
        continue
      for child in filter(is_node, leaves):
        if id(child) not in self._new:
          raise ValueError(
            "convert: modules must not contain each other, got "
            f"{_name((*path, key))} inside itself; convert the parts before "
            "you connect them"
          )
      new = tree.unflatten(self._new.get(id(x), (x, x))[1] for x in leaves)
      setattr(node, key, new if is_node(new) else nnx.data(new))

  def _convert(
    self, name: str, module: nnx.Module, original: nnx.Module
  ) -> nnx.Module:
    """Converts one module whose children are already converted."""
    kind = type(module)
    try:
      if kind in COUNTERPARTS:
        new = convert_layer(module, self.recipe)
        self.replaced[name] = type(new).__name__
        return new
      if kind in self.blocks:
        ours = self.blocks[kind]
        new = fuse(original, module, ours, self.roles)
        # The parts of a block are not reported one by one.
        start = "" if name == "." else f"{name}."
        for part in [p for p in self.replaced if p.startswith(start)]:
          del self.replaced[part]
        self.replaced[name] = ours.__name__
        return new
    except (TypeError, ValueError) as error:
      self.left[name] = str(error)
    else:
      self._explain(name, module)
    holds_linear = any(isinstance(x, Linear) for x in parts_of(module).values())
    # Blocks of ours, and containers, are no classes to name in `blocks`.
    ours = RecipeModule | FusedBlock | nnx.List | nnx.Dict
    if holds_linear and not isinstance(module, ours):
      if kind.__name__ not in self.matmuls_only:
        self.matmuls_only.append(kind.__name__)
    return module

  def _explain(self, name: str, module: nnx.Module) -> None:
    """Records why a module that directly holds variables was not replaced."""
    if isinstance(module, RecipeModule | FusedBlock):
      return
    if any(isinstance(x, nnx.Variable) for x in vars(module).values()):
      kind = type(module)
      parents = [x.__name__ for x in COUNTERPARTS if isinstance(module, x)]
      why = "there is no FP8 layer for it"
      if parents:
        why = f"a subclass of {parents[0]} may compute something else"
      self.left[name] = f"{kind.__name__}: {why}"


def _nodes(model: nnx.Module) -> list[tuple[tuple, Any]]:
  """Lists modules and their containers with paths, children first."""
  return [(path, x) for path, x in nnx.iter_graph(model) if is_node(x)]


def _is_leaf(x: Any) -> bool:
  return isinstance(x, nnx.Pytree | nnx.Variable)


def _name(path: tuple) -> str:
  return ".".join(map(str, path)) or "."
