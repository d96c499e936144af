# SPDX-License-Identifier: Apache-2.0
"""The options of the optimizer, of its codec, and of the learning rate."""

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

import tyro

from coat_jax import codecs
from coat_jax.models.ranges import (
  NotNegative,
  Positive,
  Range,
  Width,
  check_fields,
)
from coat_jax.optimizer import Clipping
from train.options import check_unused, converted, defaults, fixed

# Options that are passed to the codec if it accepts them.
_CODEC_OPTIONS = ("rounding", "group_size", "second")

# Options that only some optimizers accept.
OPTIMIZERS = {
  "coat_adamw": ("eps", "second"),
  "coat_lion": (),
  "coat_muon": ("eps", "second", "momentum"),
}

# A known name, or package.module:function for a codec of the user.
Codec = Annotated[
  str, tyro.conf.arg(metavar=f"{{{','.join(codecs.names())}}}|MODULE:FN")
]
# f32 rounds larger decays to 1, and the bias correction would divide by 0.
Decay = Annotated[float, Range(0, 0.9999999)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
  """The optimizer, the codec of its stored moments, and the learning rate.

  Attributes:
    lr: The largest learning rate.
    optimizer: How weights are updated. coat_muon orthogonalizes the updates of
      hidden matrices, scaled like AdamW's, and uses AdamW for the rest.
    codec: How both moments are stored between steps; package.module:function
      calls a function of yours that returns a MomentCodec.
    rounding: How 8-bit codecs round; nearest freezes second moments at a high
      b2.
    group_size: How many values share statistics in 8-bit codecs.
    second: The format of the second moment in codec coat.
    schedule: How the learning rate falls after the warmup.
    warmup: Steps in which the learning rate rises from 0; below 1, a share of
      all steps.
    min_lr_ratio: The last learning rate, as a share of lr.
    b1: Decay of the first moment.
    b2: Decay of the second moment.
    eps: Added to the square root of the second moment.
    momentum: Decay of the matrices' momentum in coat_muon.
    weight_decay: Decoupled weight decay of all parameters except norms, biases
      and embeddings.
    grad_clip: Largest global norm of the gradients.
    clip: How gradients are clipped. global uses the norm of all gradients. The
      others clip each layer of each parameter by itself: share uses its share
      of grad_clip in the previous step, adaptive the running mean of its norms.

  Raises:
    ValueError: a value outside its range, or one that the codec refuses.
  """

  lr: Positive
  optimizer: Literal["coat_adamw", "coat_lion", "coat_muon"] = fixed(
    "coat_adamw"
  )
  codec: Codec = converted("coat")
  rounding: Literal["stochastic", "nearest"] = converted("stochastic")
  group_size: Width = converted(128)
  second: Literal["e4m3", "e5m2"] = converted("e4m3")
  schedule: Literal["cosine", "linear"] = "cosine"
  warmup: Annotated[float, Range(0, 2**31 - 1)] = 2000
  min_lr_ratio: Annotated[float, Range(0, 1)] = 0.0
  b1: Decay = 0.9
  b2: Decay = 0.95
  eps: Annotated[float, Range(1.2e-38, 1)] = 1e-8
  momentum: Decay = 0.95
  weight_decay: NotNegative = 0.1
  grad_clip: Positive = 1.0
  clip: Literal["global", "share", "adaptive"] = converted("global")

  def __post_init__(self):
    check_fields(self)
    check_unused(self, "optimizer", OPTIMIZERS)
    check_unused(self, "codec", options_of_codecs((self.codec,)))
    try:
      self.moment_codec()  # Raises for options that the codec refuses.
    except TypeError as error:  # The user's function returned something else.
      raise ValueError(str(error)) from error

  def moment_codec(self) -> codecs.MomentCodec:
    """Builds the codec, with the options that it accepts."""
    taken = options_of_codecs((self.codec,))[self.codec]
    options = {name: getattr(self, name) for name in taken}
    return codecs.build(self.codec, **options)

  def clipping(self) -> Clipping | None:
    """Builds the clipping rule; None clips by the global norm."""
    return (
      None if self.clip == "global" else Clipping(self.clip, self.grad_clip)
    )

  def with_optimizer(self, optimizer: str, **options: Any) -> Self:
    """Returns the options for an optimizer; resets those it does not accept."""
    unused = defaults(self, OPTIMIZERS)
    for name in OPTIMIZERS[optimizer]:
      unused.pop(name)
    options = unused | dict(optimizer=optimizer) | options
    return dataclasses.replace(self, **options)

  def warmup_steps(self, steps: int) -> int:
    """Computes the steps of warmup in a run of `steps`."""
    return round(self.warmup * steps if self.warmup < 1 else self.warmup)


def options_of_codecs(names: Iterable[str] = ()) -> dict[str, list[str]]:
  """Lists the options that each known codec, and each of `names`, accepts."""
  return {
    name: [x for x in _CODEC_OPTIONS if x in codecs.options(name)]
    for name in (*codecs.names(), *names)
  }
