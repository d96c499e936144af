# SPDX-License-Identifier: Apache-2.0
"""Describes each parameter of a model: its role, its sharding, its matrices."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from coat_jax.mesh import split_inputs
from coat_jax.models.config import ModelConfig
from coat_jax.models.vision.config import VisionConfig
from coat_jax.numerics.checks import check_kind
from coat_jax.optimizer.masks import check_leaf, leaf_path
from coat_jax.optimizer.matrices import Matrices, MatrixSplit
from coat_jax.recipes import GradDtype, MeshAxes

# The mesh axes that models use.
AXES = MeshAxes(batch=("data", "fsdp"), fsdp="fsdp", tensor="tensor")
# The optional mesh axis that splits the experts and, like `data`, the batch.
EXPERT = "expert"

Role = Literal[
  "matrix",
  "bias",
  "norm",
  "router",
  "embedding",
  "positions",
  "output",
  "probe",
]
# Which mesh axes split an array axis:
#   "rows"             fsdp
#   "columns"          tensor, which gives each device some heads, MLP channels,
#                      vocabulary tokens or positions
#   "rows of columns"  tensor, then fsdp. The rows of `down`, for example, read
#                      the outputs of another weight's columns.
#   "experts"          expert
# fsdp never splits a weight's last array axis, along which each device must
# store whole groups of values.
Axis = Literal["rows", "columns", "rows of columns", "experts"]


class Parameter(NamedTuple):
  """Describes all parameters whose paths have the same ending.

  Attributes:
    role: how the model uses the parameter. A "matrix" is the weight of a linear
      layer other than the head and the router.
    axes: how a mesh splits each array axis except the axis of layers; () if
      each device stores the whole parameter.
    split: how the parameter is split into matrices: `MatrixSplit()` for one
      matrix per layer or expert; None if it is not split, as for norms. For q,
      k and v, `matrix_split` returns a different split.
  """

  role: Role
  axes: tuple[Axis | None, ...] = ()
  split: MatrixSplit | None = None


_ONE, _GATE_UP = MatrixSplit(), MatrixSplit(reduction_axis=-3)
_FIRST = ("rows", "columns")
_SECOND = ("rows of columns", None)
# Keyed by the ending of a parameter's path; the longest matching key is used.
PARAMETERS: dict[str, Parameter] = {
  "embedding": Parameter("embedding", _SECOND),
  "position_embedding": Parameter("positions", _SECOND),
  "head": Parameter("output", _FIRST),
  "norm/scale": Parameter("norm"),
  "norm/bias": Parameter("norm"),
  "qkv/linear/kernel": Parameter("matrix", _FIRST, _ONE),
  "qkv/linear/bias": Parameter("bias", ("columns",)),
  "attention/out/kernel": Parameter("matrix", _SECOND, _ONE),
  "attention/out/bias": Parameter("bias"),
  "gate_up/kernel": Parameter("matrix", ("rows", None, "columns"), _GATE_UP),
  "mlp/up/kernel": Parameter("matrix", _FIRST, _ONE),
  "mlp/up/bias": Parameter("bias", ("columns",)),
  "down/kernel": Parameter("matrix", _SECOND, _ONE),
  "down/bias": Parameter("bias"),
  "mlp/router": Parameter("router"),
  "mlp/gate_up": Parameter(
    "matrix", ("experts", "rows", None, "columns"), _GATE_UP
  ),
  "mlp/down": Parameter("matrix", ("experts", *_SECOND), _ONE),
}
# A tower's patch embedding, its pooling and the projector are not sharded: they
# are small, and a mesh cannot evenly split some dimensions, such as 577 tokens.
_ENDS = ("patches", "pool", "projector")
_AT_ENDS: dict[str, Parameter] = {
  "kernel": Parameter("matrix"),
  "bias": Parameter("bias"),
  "scale": Parameter("norm"),
  "class_embed": Parameter("embedding"),
  "position_embed": Parameter("positions"),
  "probe": Parameter("probe"),
}


def parameter(path: str, op: str = "param_shardings") -> Parameter:
  """Looks up a parameter by its path, such as "layers/mlp/gate_up/kernel"."""
  names = path.split("/")
  if any(end in names for end in _ENDS) and names[-1] in _AT_ENDS:
    return _AT_ENDS[names[-1]]
  found = [end for end in PARAMETERS if path.endswith(end)]
  if not found:
    raise ValueError(
      f"{op}: params must be a model's, got {path!r}, which no "
      "model has; pass nnx.to_pure_dict(nnx.state(model, nnx.Param))"
    )
  return PARAMETERS[max(found, key=len)]


def is_stacked(path: str) -> bool:
  """Returns whether a parameter has a leading axis of layers."""
  return "layers" in path.split("/")


def matrix_split(
  path: str, config: ModelConfig | VisionConfig | None
) -> MatrixSplit | None:
  """Returns how a parameter is split into matrices; None for no split.

  A parameter with one matrix per layer or expert has the split `MatrixSplit()`.
  Norms, embeddings and biases have no split, except for the bias of q, k and v.
  `config` is None for the projector's parameters.
  """
  is_qkv = path.endswith(("qkv/linear/kernel", "qkv/linear/bias"))
  if config is None or not is_qkv:
    return parameter(path).split
  width = config.head_width
  shared = config.num_heads // config.num_kv_heads
  return MatrixSplit(
    parts=(shared * width, width, width), groups=config.num_kv_heads
  )


def model_matrices(config: ModelConfig | VisionConfig) -> Matrices:
  """Returns how Muon cuts the parameters of a model into matrices.

  Stacked layers and experts become separate matrices, and so do q, k, v, gate
  and up. Some parameters are not matrices: embeddings, the head, routers,
  norms, biases, and a tower's patch embedding and pooling.

  Args:
    config: the shape of a `Decoder` or a `VisionTower`.

  Returns:
    A function of (path, leaf), to pass to `coat_muon` as `matrices`.

  Raises:
    TypeError: `config` is neither a `ModelConfig` nor a `VisionConfig`.

  Examples:
    >>> import jax
    >>> from coat_jax.models import ModelConfig, model_matrices
    >>> matrices = model_matrices(
    ...   ModelConfig(
    ...     family="llama", num_layers=2, d_model=64, d_ff=160, num_heads=4,
    ...     num_kv_heads=2, vocab_size=384,
    ...   )
    ... )
    >>> kernel = jax.ShapeDtypeStruct((2, 64, 128), "float32")
    >>> matrices("layers/attention/qkv/linear/kernel", kernel).parts
    (32, 16, 16)
  """
  op = "model_matrices"
  kinds = (ModelConfig, VisionConfig)
  check_kind(op, "config", config, kinds, "pass model.config")

  def matrices(path: str, leaf: Any) -> MatrixSplit | None:
    check_leaf(op, path, leaf)
    is_matrix = parameter(path, op).role == "matrix"
    return matrix_split(path, config) if is_matrix else None

  return matrices


def param_shardings(mesh: Mesh | AbstractMesh, params: Any) -> Any:
  """Returns how the parameters of a model are sharded.

  Args:
    mesh: a mesh with the axes data, fsdp and tensor, and possibly expert.
    params: nested dicts of arrays or of `jax.ShapeDtypeStruct`s.

  Returns:
    A tree of `NamedSharding`s with the structure of `params`.

  Raises:
    TypeError: `mesh` is not a mesh.
    ValueError: the mesh lacks an axis, or `params` do not belong to a model.
  """
  op = "param_shardings"
  check_kind(
    op, "mesh", mesh, (Mesh, AbstractMesh), "make one with jax.make_mesh"
  )
  wanted = AXES.tokens
  if missing := [name for name in wanted if name not in mesh.shape]:
    raise ValueError(
      f"{op}: mesh must have the axes {', '.join(wanted)}, got none named "
      f"{missing[0]}; give unused axes size 1"
    )
  axes = _with_experts(mesh.shape)
  return jax.tree.map_with_path(
    lambda keys, _: NamedSharding(mesh, param_spec(leaf_path(keys), axes)),
    params,
  )


def param_spec(path: str, axes: MeshAxes = AXES) -> PartitionSpec:
  """Returns a parameter's PartitionSpec; P() if the parameter is not split."""
  names = {
    None: None,
    "rows": axes.fsdp,
    "columns": axes.tensor,
    "rows of columns": split_inputs(axes)[0],
    "experts": axes.expert,
  }
  own = [names[axis] for axis in parameter(path).axes]
  if own and is_stacked(path):
    own = [None, *own]  # The axis of layers is never split.
  return PartitionSpec(*own)


def mesh_axes(
  sizes: Mapping[Any, int], *, grad_dtype: GradDtype = "float32"
) -> MeshAxes:
  """Returns a recipe's axes for a mesh; drops `tensor` if its size is 1."""
  if {*sizes} - {EXPERT} != {*AXES.tokens}:
    raise ValueError(
      f"mesh: its axes must be {', '.join(AXES.tokens)}, got "
      f"{', '.join(sizes)}; give unused axes size 1"
    )
  axes = _with_experts(sizes)
  tensor = axes.tensor if sizes["tensor"] > 1 else None
  return dataclasses.replace(axes, tensor=tensor, grad_dtype=grad_dtype)


def _with_experts(names: Iterable[str]) -> MeshAxes:
  """Returns `AXES`, with the axis `expert` added if the mesh has one."""
  if EXPERT not in names:
    return AXES
  return dataclasses.replace(AXES, batch=(*AXES.batch, EXPERT), expert=EXPERT)
