# SPDX-License-Identifier: Apache-2.0
"""A codec that is not one of coat_jax's, for `--optim.codec`."""

from coat_jax import codecs


def scaled(group_size: int = 128) -> codecs.MomentCodec:
  """The codec fp8 under another name; it takes no other option."""
  plain = codecs.fp8(group_size)
  return codecs.MomentCodec(name="scaled", mu=plain.mu, nu=plain.nu)


def nothing() -> None:
  """No codec."""
