# SPDX-License-Identifier: Apache-2.0
"""Inlined PTX for `grouped_kernel`."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from coat_jax.pallas.mosaic import emit

# A register holds the codes of 4 consecutive tokens, and the registers of 4
# consecutive lanes hold the codes of 16 consecutive tokens.
_LAYOUT = plgpu.Layout.WGMMA_8BIT
_SCALAR = plgpu.Layout.WG_SPLAT
# Keeps bits [$2 + $4, $3 + $4) of $1, and clears the others. A shift by more
# than 31 bits results in 0.
_KEEP = """{
  .reg .b32 first, last;
  add.s32 first, $2, $4;
  add.s32 last, $3, $4;
  max.s32 first, first, 0;
  max.s32 last, last, 0;
  shl.b32 first, -1, first;
  shl.b32 last, -1, last;
  not.b32 last, last;
  and.b32 first, first, last;
  and.b32 $0, $1, first;
}"""


def own_codes(rows_smem, begin: Array, end: Array) -> Array:
  """Reads codes [64, tokens], and zeroes all tokens outside [begin, end).

  It masks whole registers, because masking each code takes four times as many
  instructions.
  """
  codes = plgpu.load(rows_smem, layout=_LAYOUT, optimized=False)
  bits = lax.bitcast_convert_type(codes, jnp.int8)

  @plgpu.inline_mgpu(
    arg_types=(_LAYOUT, _SCALAR, _SCALAR),
    return_type=plgpu.ShapeDtypeStruct(bits.shape, bits.dtype, layout=_LAYOUT),
  )
  def mask(_, bits, begin, end):
    word = ir.VectorType.get((1,), emit.i32_type())
    token = arith.muli(arith.andi(emit.thread(), emit.i32(3)), emit.i32(4))
    begin, end = (
      arith.muli(arith.subi(x.registers.item(), token), emit.i32(8))
      for x in (begin, end)
    )
    found = np.empty_like(bits.registers)
    for place, register in np.ndenumerate(bits.registers):
      first = emit.i32(-8 * 16 * place[1])  # The second axis is along tokens.
      old = emit.element(vector.bitcast(word, register), 0)
      new = emit.asm(_KEEP, old, begin, end, first)
      new = vector.from_elements(word, [new])
      found[place] = vector.bitcast(register.type, new)
    return mgpu.FragmentedArray(
      _registers=found, _layout=bits.layout, _is_signed=bits.is_signed
    )

  bits = mask(bits, begin, end)  # pyright: ignore[reportCallIssue]
  return lax.bitcast_convert_type(bits, codes.dtype)  # pyright: ignore[reportArgumentType]
