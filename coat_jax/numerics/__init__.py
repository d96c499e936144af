# SPDX-License-Identifier: Apache-2.0
"""Number formats, quantized arrays, and scalings of matmul operands."""

from coat_jax.numerics.formats import E4M3 as E4M3
from coat_jax.numerics.formats import E5M2 as E5M2
from coat_jax.numerics.qtensor import QTensor as QTensor
from coat_jax.numerics.qtensor import quantize as quantize
