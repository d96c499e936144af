# SPDX-License-Identifier: Apache-2.0
"""How the parameters of a decoder are sharded over a mesh.

Last axes of weights are split by `tensor` alone: groups of values that share a
scale run along them, and a device must have whole groups.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from coat_jax.checks import check_kind
from coat_jax.layers.mesh.specs import split_inputs
from coat_jax.recipe import GradDtype, MeshAxes

# The axes of the meshes that `mesh_axes` and `param_shardings` take.
AXES = MeshAxes(batch=("data", "fsdp"), fsdp="fsdp", tensor="tensor")
# Parts that each device has whole: of a vision tower at its ends, which are
# small and of which few sizes divide by anything, and what is behind it.
_WHOLE = ("patches/", "pool/", "projector/")
# The axes of each parameter, by the end of its path: "rows" are split by fsdp,
# "columns" by tensor. "rows of columns" belong to the columns of the weight
# before, and both split them: rows of these heads, of these columns of the MLP,
# or of this part of the vocabulary.
PARAMETER_AXES = {
  "embedding": ("rows of columns", None),
  "head": ("rows", "columns"),
  "qkv/linear/kernel": (None, "rows", "columns"),
  "qkv/linear/bias": (None, "columns"),
  "attention/out/kernel": (None, "rows of columns", None),
  "gate_up/kernel": (None, "rows", None, "columns"),
  "down/kernel": (None, "rows of columns", None),
  "norm/scale": (),
  "norm/bias": (),
  "mlp/up/kernel": (None, "rows", "columns"),
  "mlp/up/bias": (None, "columns"),
  "attention/out/bias": (),
  "down/bias": (),
  # The expert axis is never sharded.
  "mlp/router": (),
  "mlp/gate_up": (None, None, "rows", None, "columns"),
  "mlp/down": (None, None, "rows of columns", None),
}


def param_shardings(mesh: Mesh | AbstractMesh, params: Any) -> Any:
  """How the parameters of a model are sharded.

  Args:
    mesh: From `make_mesh`.
    params: Nested dicts of arrays or of `jax.ShapeDtypeStruct`s.

  Returns:
    The same tree of `NamedSharding`s, as `PARAMETER_AXES` says.

  Raises:
    TypeError: `mesh` is none.
    ValueError: it has not the axes, or a parameter is of no model.
  """
  op = "param_shardings"
  check_kind(
    op, "mesh", mesh, (Mesh, AbstractMesh), "make one with jax.make_mesh"
  )
  wanted = AXES.tokens
  if missing := [name for name in wanted if name not in mesh.shape]:
    raise ValueError(
      f"{op}: mesh must have the axes {', '.join(wanted)}, got none named "
      f"{missing[0]}; axes that are not needed have size 1"
    )
  return jax.tree.map_with_path(
    lambda path, _: NamedSharding(mesh, param_spec(path)), params
  )


def mesh_axes(
  sizes: Mapping[Any, int], *, grad_dtype: GradDtype = "float32"
) -> MeshAxes:
  """The axes of a mesh as layers use them, for a recipe.

  Args:
    sizes: of the mesh's axes, which are data, fsdp and tensor.
    grad_dtype: in what gradients are summed over devices.

  Returns:
    The axes; `tensor` only where it has devices.

  Raises:
    ValueError: other axes.
  """
  if set(sizes) != set(AXES.tokens):
    raise ValueError(
      f"mesh: its axes must be {', '.join(AXES.tokens)}, got "
      f"{', '.join(sizes)}; axes that are not needed have size 1"
    )
  tensor = AXES.tensor if sizes["tensor"] > 1 else None
  return dataclasses.replace(AXES, tensor=tensor, grad_dtype=grad_dtype)


def param_spec(path: Any, axes: MeshAxes = AXES) -> PartitionSpec:
  """Looks a parameter up in `PARAMETER_AXES`.

  Args:
    path: The keys that lead to it, from `jax.tree.map_with_path`.
    axes: Those of the mesh.

  Returns:
    Which axes of a mesh split its axes, those of stacked layers included.

  Raises:
    ValueError: no model has such a parameter.
  """
  name = jax.tree_util.keystr(path, simple=True, separator="/")
  if any(part in name for part in _WHOLE):
    return PartitionSpec()
  found = [own for end, own in PARAMETER_AXES.items() if name.endswith(end)]
  if len(found) != 1:
    raise ValueError(
      f"param_shardings: params must be a model's, got {name!r}, which no "
      "model has; pass nnx.to_pure_dict(nnx.state(model, nnx.Param))"
    )
  (kinds,) = found
  names = {
    "rows": axes.fsdp,
    "columns": axes.tensor,
    "rows of columns": split_inputs(axes)[0],
  }
  return PartitionSpec(*map(names.get, kinds))
