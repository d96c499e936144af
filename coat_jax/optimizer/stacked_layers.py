# SPDX-License-Identifier: Apache-2.0
"""Finds stacked layers in the parameters, and runs one layer at a time."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from coat_jax.optimizer.clipping import is_stacked
from coat_jax.optimizer.masks import leaf_paths


class LayerPasses:
  """Runs one layer's forward and backward separately.

  `jax.vjp` returns a function that is a tree: its arrays are what the backward
  reads. We leave out those that are the layer's parameters between forward and
  backward, since they are in memory anyway.
  """

  def __init__(self, layer: Callable[..., Any], params: Any):
    self._layer, self._params = layer, params
    self._structure: Any = None
    self._places: list[int | None] = []

  def forward(self, x, inputs):
    """Returns x for the next layer, and what is saved."""
    layer_params, per_layer = inputs
    extra = () if per_layer is None else (per_layer,)
    trace("layer", self._layer, self._params, layer_params, x, *extra)
    y, vjp = jax.vjp(
      lambda params, x: self._layer(params, x, *extra), layer_params, x
    )
    given, found = (jax.tree.map(jax.typeof, each) for each in (x, y))
    if jax.tree.flatten(found) != jax.tree.flatten(given):
      raise ValueError(
        "step_in_backward: a layer must return what it takes, got "
        f"{found} for {given}; cast the result"
      )
    leaves, self._structure = jax.tree.flatten(vjp)
    known = jax.tree.leaves((layer_params, per_layer))
    place = {id(leaf): n for n, leaf in enumerate(known)}
    self._places = [place.get(id(leaf)) for leaf in leaves]
    saved = zip(leaves, self._places, strict=True)
    return y, [leaf for leaf, place in saved if place is None]

  def backward(self, saved, layer_params, per_layer, dy):
    """Returns the gradients of the layer's parameters and of its input."""
    known = jax.tree.leaves((layer_params, per_layer))
    rest = iter(saved)
    leaves = [next(rest) if n is None else known[n] for n in self._places]
    return jax.tree.unflatten(self._structure, leaves)(dy)


class StackSplit:
  """Marks the leaves of a tree that are stacked layers.

  Attributes:
    stacked, others: indices of the stacked leaves, and of all others.
    num_layers: number of layers in the stack.
  """

  def __init__(self, params: Any, stack: str):
    found = is_stacked(params, stack)
    leaves, self._treedef = jax.tree.flatten(params)
    self.stacked = [i for i, below in enumerate(found) if below]
    self.others = [i for i, below in enumerate(found) if not below]
    self._words = stack.split("/")
    sizes = {leaves[i].shape[:1] for i in self.stacked}
    if len(sizes) != 1 or sizes == {()}:
      raise ValueError(
        "step_in_backward: parameters of the stack must have layers as their "
        f"first axis, got {sorted(sizes) or 'no parameters'} below {stack!r}; "
        "pass stack, the path of the stacked layers' subtree"
      )
    [[self.num_layers]] = sizes
    only = dict.fromkeys(self.stacked, True)
    subtree = self._subtree([only.get(i) for i in range(len(leaves))])
    self._layers = jax.tree.structure(subtree)

  def outer(self, params: Any) -> Any:
    """Returns `params` with None instead of stacked leaves."""
    leaves: list[Any] = jax.tree.leaves(params)
    for i in self.stacked:
      leaves[i] = None
    return self._treedef.unflatten(leaves)

  def layers(self, params: Any) -> Any:
    """Returns the stack's subtree."""
    leaves = jax.tree.leaves(params)
    return self.layer_of([leaves[i] for i in self.stacked])

  def layer_of(self, leaves: list[Any]) -> Any:
    """Returns the stack's subtree with these leaves."""
    return self._layers.unflatten(leaves)

  def _subtree(self, leaves: list[Any]) -> Any:
    node = self._treedef.unflatten(leaves)
    for word in self._words:
      is_mapping = isinstance(node, Mapping)
      node = node[word] if is_mapping else getattr(node, word)
    return node


_SHARED = (
  "let before return what all layers share together with x, and let layers "
  "hand it on"
)
_OUTER = "read it from outer; only layer reads the stack's parameters"


def trace(name: str, f: Callable[..., Any], params: Any, *args: Any) -> Any:
  """Traces one of the user's functions to a jaxpr.

  Raises a ValueError if it closes over a leaf of `params`, which would get no
  gradient.
  """
  closed = jax.make_jaxpr(f)(*args)
  constants = {id(x) for x in _constants(closed)}
  for path, leaf in leaf_paths(params):
    if id(leaf) in constants:
      raise ValueError(
        f"step_in_backward: {name} must read parameters from its arguments, "
        f"got one that closes over {path!r}, which would get no gradient; "
        f"{_SHARED if name == 'layer' else _OUTER}"
      )
  return closed.jaxpr


def _constants(closed: Any) -> list[Any]:
  """Lists everything that a traced function closes over."""
  found = list(closed.consts)
  for equation in closed.eqns:
    for value in jax.tree.leaves(tuple(equation.params.values())):
      if isinstance(value, ClosedJaxpr):
        found += _constants(value)
  return found


def arguments_read(jaxpr: Any) -> list[bool]:
  """Lists whether a traced function reads each leaf of its arguments."""
  read = {id(v) for equation in jaxpr.eqns for v in equation.invars}
  read |= {id(v) for v in jaxpr.outvars}
  return [id(v) in read for v in jaxpr.invars]
