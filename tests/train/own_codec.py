# SPDX-License-Identifier: Apache-2.0
"""A user's codec for `--optim.codec`, which coat_jax does not know."""

from coat_jax import codecs


def scaled(group_size: int = 128) -> codecs.MomentCodec:
  """Returns the codec fp8 as "scaled", with group_size as its only option."""
  plain = codecs.fp8(group_size)
  return codecs.MomentCodec(name="scaled", mu=plain.mu, nu=plain.nu)


def nothing() -> None:
  """Returns no codec, which is an error."""
