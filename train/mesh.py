# SPDX-License-Identifier: Apache-2.0
"""The mesh of devices to train on, and checks that a run fits it.

Each axis of the mesh splits some arrays over its devices:

  data     the sequences of a batch (each device has a copy of the weights)
  fsdp     the sequences of a batch; rows of weights, gradients and moments
  expert   the sequences of a batch; the experts of a mixture
  tensor   attention heads, columns of the MLP and the vocabulary; between
           layers, the positions of each sequence

Only `tensor` splits the last dimension of weights. Groups of values that share
a scale run along that dimension, and each device must hold whole groups.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from coat_jax.models import VisionConfig
from coat_jax.models.params import EXPERT, mesh_axes
from coat_jax.numerics.scaling import BLOCK

_MOST_DEVICES = 2**16
# A mesh has the axis `expert` only if its size is above 1.
MESH_AXES = ("data", "fsdp", EXPERT, "tensor")


def parse_mesh(text: str) -> dict[str, int]:
  """Parses a mesh such as `data=2,fsdp=4`."""
  sizes: dict[str, int] = {}
  for part in text.split(",") if text else ():
    name, _, size = (word.strip() for word in part.partition("="))
    if name not in MESH_AXES:
      raise ValueError(
        f"mesh: expected axes {', '.join(MESH_AXES)}, got {name!r} in "
        f"{text!r}; write it as data=2,fsdp=4,tensor=1"
      )
    is_number = size.isascii() and size.isdigit() and len(size) < 10
    if name in sizes or not (is_number and 1 <= int(size) <= _MOST_DEVICES):
      raise ValueError(
        f"mesh: expected one size per axis, from 1 to {_MOST_DEVICES}, got "
        f"{part.strip()[:40]!r} in {text[:80]!r}; write it as "
        "data=2,fsdp=4,tensor=1"
      )
    sizes[name] = int(size)
  return _all_axes(sizes) if sizes else {}


def _all_axes(sizes: Mapping[str, int]) -> dict[str, int]:
  """Returns the sizes in the order of the axes; an omitted axis has size 1."""
  every = {name: sizes.get(name, 1) for name in MESH_AXES}
  return {name: n for name, n in every.items() if name != EXPERT or n > 1}


def format_mesh(sizes: Mapping[str, int]) -> str:
  """Formats the sizes of a mesh as text that `parse_mesh` reads."""
  return ",".join(f"{name}={size}" for name, size in sizes.items())


def make_mesh(
  sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None
) -> Mesh | None:
  """Builds the mesh, with Auto axes; returns None if there are no sizes."""
  if not sizes:
    return None
  devices = jax.devices() if devices is None else devices
  count = math.prod(sizes.values())
  if count != len(devices):
    raise ValueError(
      f"mesh: {format_mesh(sizes)} is for {count} devices, got {len(devices)}; "
      f"{format_mesh(_fitting(sizes, len(devices)))} would fit"
    )
  # Neighbors along the last axis exchange the most data, so they should be on
  # one host. jax.make_mesh refuses hosts that have no NVLink between them.
  order = sorted(devices, key=lambda device: (device.process_index, device.id))
  return Mesh(
    np.array(order).reshape(tuple(sizes.values())),
    tuple(sizes),
    axis_types=(AxisType.Auto,) * len(sizes),
  )


def _fitting(sizes: Mapping[str, int], count: int) -> dict[str, int]:
  """Adapts the sizes of a mesh to `count` devices, for an error message."""
  found = {}
  for name in ("tensor", EXPERT, "data"):
    found[name] = math.gcd(sizes.get(name, 1), count)
    count //= found[name]
  return _all_axes(found | dict(fsdp=count))


def check_fits(run: Any) -> None:
  """Checks that the mesh of a `TrainConfig` can split its model and batches."""
  model, sizes = run.model, run.mesh_sizes
  data, fsdp, expert, tensor = (sizes.get(name, 1) for name in MESH_AXES)
  is_tiled = run.recipe == "fp8_block"
  if is_tiled and tensor > 1:
    raise ValueError(
      "TrainConfig: recipe fp8_block needs one device along the tensor axis, "
      f"got {tensor}; split weights over fsdp, or pass --recipe coat"
    )
  tables = {
    name: size
    for name in ("vocab_size", "max_positions")
    if (size := getattr(model, name, None)) is not None
  }
  heads = dict(num_heads=model.num_heads, num_kv_heads=model.num_kv_heads)
  whole = heads | dict(d_ff=model.d_ff) | tables | dict(seq=run.seq)
  _check_divides("tensor", tensor, "", whole)
  if tensor > 1 and run.recipe not in ("bf16", "fp8_linear"):
    _check_groups(model.d_ff, tensor, run.activation_group_size)
  # fsdp splits the rows that each device along `tensor` holds.
  rows = dict(d_model=model.d_model, d_ff=model.d_ff) | tables
  rows = {name: size // tensor for name, size in rows.items()}
  _check_divides("fsdp", fsdp, f" / tensor={tensor}" * (tensor > 1), rows)
  if expert > 1:
    _check_experts(model, expert)
  factors = dict(data=data, fsdp=fsdp, expert=expert, accumulate=run.accumulate)
  if expert == 1:
    del factors[EXPERT]
  shards = math.prod(factors.values())
  if run.batch % shards:
    raise ValueError(
      f"mesh: batch must be a multiple of {' * '.join(factors)} = "
      f"{' * '.join(map(str, factors.values()))} = {shards}, got {run.batch}; "
      f"{max(run.batch // shards, 1) * shards} would fit"
    )
  if is_tiled and fsdp > 1:
    _check_tiles(model, fsdp)


def _check_experts(model: Any, expert: int) -> None:
  num_experts = getattr(model, "num_experts", None)
  if num_experts is None:
    raise ValueError(
      "mesh: the `expert` axis needs a mixture of experts, got "
      f"expert={expert} for a model without experts; use data or fsdp instead"
    )
  _check_divides(EXPERT, expert, "", dict(num_experts=num_experts))


def _check_groups(d_ff: int, tensor: int, group: int) -> None:
  """Checks that the mesh splits no group of activations that share a scale."""
  columns = d_ff // tensor
  if columns % group:
    raise ValueError(
      "mesh: d_ff / tensor must be a multiple of activation_group_size, got "
      f"{d_ff} / {tensor} = {columns} and {group}; an activation_group_size of "
      f"{math.gcd(columns, group)} would fit"
    )


def check_tower_fits(sizes: Mapping[str, int], vision: VisionConfig) -> None:
  """Checks that a vision tower can be sharded over a mesh."""
  tensor, fsdp = (sizes.get(name, 1) for name in ("tensor", "fsdp"))
  names, share = ("num_heads", "d_ff", "num_tokens"), " of the vision tower"
  whole = {name: getattr(vision, name) for name in names}
  _check_divides("tensor", tensor, share, whole)
  rows = dict(d_model=vision.d_model // tensor, d_ff=vision.d_ff // tensor)
  _check_divides("fsdp", fsdp, f"{share} / tensor={tensor}", rows)


def _check_divides(
  axis: str, size: int, share: str, lengths: Mapping[str, int]
) -> None:
  """Checks that the size of a mesh axis divides all these lengths."""
  common = math.gcd(*lengths.values())
  if common % size == 0:
    return
  name = next(name for name, value in lengths.items() if value % size)
  most = min(common, _MOST_DEVICES)
  fitting = [str(n) for n in range(1, most + 1) if common % n == 0]
  raise ValueError(
    f"mesh: {axis} must divide {name}{share}, got {axis}={size} and "
    f"{lengths[name]}; {axis} of {', '.join(fitting[:8])} would fit this model"
  )


def _check_tiles(model: Any, fsdp: int) -> None:
  """Checks that each device along fsdp holds whole tiles of weights."""
  rows = {
    "d_model": model.d_model,
    "num_heads * width": model.num_heads * model.head_width,
  }
  if getattr(model, "num_experts", None) is None:  # Expert matmuls are in BF16.
    rows["d_ff"] = model.d_ff
  wrong = [name for name in rows if rows[name] % (fsdp * BLOCK)]
  if not wrong:
    return
  common = math.gcd(*rows.values())
  most = common // BLOCK
  fitting = [1, *(n for n in range(2, most + 1) if common % (n * BLOCK) == 0)]
  raise ValueError(
    f"mesh: recipe fp8_block needs whole tiles of {BLOCK} rows of each weight "
    f"on a device, got {wrong[0]} / fsdp = {rows[wrong[0]]} / {fsdp} = "
    f"{rows[wrong[0]] / fsdp:g}; fsdp of {', '.join(map(str, fitting[:8]))} "
    "would fit, with the other devices along data, or pass --recipe coat"
  )


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of tokens [B, T + 1]; `tensor` does not split B."""
  return NamedSharding(mesh, PartitionSpec(mesh_axes(mesh.shape).batch))


def batch_devices(sizes: Mapping[str, int]) -> int:
  """Counts the devices that split a batch, along all axes but `tensor`."""
  return math.prod(sizes.values()) // sizes.get("tensor", 1)
