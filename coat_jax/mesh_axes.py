# SPDX-License-Identifier: Apache-2.0
"""Which axes of a mesh a layer's arrays are split over.

  tokens    [B, T, D]: B over `batch`, T over `tensor` between blocks
  weights   rows over `fsdp`; heads and columns of an MLP over `tensor`

A device gathers the FP8 codes of the rows of a weight when it needs them and
keeps its own share of the weight's gradient.
"""

import dataclasses
from typing import Literal

GradDtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshAxes:
  """The axes of a mesh by what they split; an axis may have one device.

  Attributes:
    batch: axes that sequences are split over.
    fsdp: the one of them that weights are split over too, or None.
    tensor: the axis that heads and an MLP's columns are split over and, between
      blocks, the positions of a sequence; or None.
    grad_dtype: in which weights' gradients are summed over devices.

  Raises:
    ValueError: `fsdp` is not one of `batch`, `tensor` is, or an unknown dtype.
  """

  batch: tuple[str, ...] = ("data", "fsdp")
  fsdp: str | None = "fsdp"
  tensor: str | None = None
  grad_dtype: GradDtype = "float32"

  def __post_init__(self):
    if self.fsdp is not None and self.fsdp not in self.batch:
      raise ValueError(
        "MeshAxes: fsdp must be one of the axes that the batch is split over, "
        f"{self.batch}, got {self.fsdp!r}; gradients are summed over it"
      )
    if self.tensor is not None and self.tensor in self.batch:
      raise ValueError(
        "MeshAxes: tensor must be another axis than those that the batch is "
        f"split over, {self.batch}, got {self.tensor!r}"
      )
    if self.grad_dtype not in ("float32", "bfloat16"):
      raise ValueError(
        "MeshAxes: grad_dtype must be 'float32' or 'bfloat16', got "
        f"{self.grad_dtype!r}"
      )

  @property
  def tokens(self) -> tuple[str, ...]:
    """All axes that tokens are split over."""
    return self.batch if self.tensor is None else (*self.batch, self.tensor)
