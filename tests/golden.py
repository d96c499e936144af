# SPDX-License-Identifier: Apache-2.0
"""Loads arrays that COAT's own Triton kernels computed on an NVIDIA H200.

`data/coat_activation.npz` contains results for random values, with T = 256,
D = 512, F = 1024 and groups of 16. BF16 arrays are stored as uint16 bits, and
FP8 arrays as uint8 bits.

  x, w         bf16 input and RMSNorm weight
  qx, sx       x in E4M3, with one bf16 scale per 1 x 16 group
  norm_q, _s   RMSNorm (eps 1e-5) of the dequantized qx, sx, with one scale
  g, u         bf16 gate and up
  silu_q, _s   SiLU of g, where g and the result are quantized per 1 x 16 group
  mul_q, _s    product of this SiLU with u, where u is quantized per 1 x 16
               group and the result has one scale
"""

from pathlib import Path

import ml_dtypes
import numpy as np

DATA = Path(__file__).parent / "data"


def activation() -> dict[str, np.ndarray]:
  """Returns BF16 arrays as f32, FP8 arrays as bits, scalar scales as f32."""
  with np.load(DATA / "coat_activation.npz") as stored:
    arrays = dict(stored)
  for name, x in arrays.items():
    if x.dtype == np.uint16:
      arrays[name] = x.view(ml_dtypes.bfloat16).astype(np.float32)
  return arrays
