# SPDX-License-Identifier: Apache-2.0
"""A user's codec for `--optim.codec`, which coat_jax does not know."""

from coat_jax import codecs


def scaled(group_size: int = 128) -> codecs.MomentCodec:
  """Returns the fp8 codec, named "scaled"; its only option is group_size."""
  plain = codecs.fp8(group_size)
  return codecs.MomentCodec(name="scaled", mu=plain.mu, nu=plain.nu)


def nothing() -> None:
  """Returns no codec, which is an error."""
