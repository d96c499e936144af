# SPDX-License-Identifier: Apache-2.0
"""Arrays that the reference implementation computed on an NVIDIA H200.

`data/coat_activation.npz`: T = 256, D = 512, F = 1024, groups of 16, made with
the reference's Triton kernels from values drawn at random. BF16 arrays are
stored as uint16 bits and FP8 arrays as uint8 bits.

  x, w         bf16 input and RMSNorm weight
  qx, sx       x in E4M3, one bf16 scale per 1 x 16 group
  norm_q, _s   RMSNorm (eps 1e-5) of the dequantized qx, sx; one scale
  g, u         bf16 gate and up
  silu_q, _s   SiLU of g after its own 1 x 16 quantization, 1 x 16 again
  mul_q, _s    product of silu and of u after 1 x 16 quantization; one scale
"""

from pathlib import Path

import ml_dtypes
import numpy as np

DATA = Path(__file__).parent / "data"


def activation() -> dict[str, np.ndarray]:
  """BF16 arrays as f32, FP8 arrays as uint8 bits, scalar scales as f32."""
  with np.load(DATA / "coat_activation.npz") as stored:
    arrays = dict(stored)
  for name, x in arrays.items():
    if x.dtype == np.uint16:
      arrays[name] = x.view(ml_dtypes.bfloat16).astype(np.float32)
  return arrays
