# SPDX-License-Identifier: Apache-2.0
"""The options for the optimizer, its codec, and the learning rate."""

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
from train.options import check_unused, converted, fixed, unused

_CODEC_OPTIONS = ("rounding", "group_size", "second")

# Options that each optimizer accepts, except those that all optimizers accept.
OPTIMIZERS = {
  "coat_adamw": ("eps", "second"),
  "coat_lion": (),
  "coat_muon": ("eps", "second", "momentum"),
}

# The name of a codec, or package.module:function for the user's own codec.
Codec = Annotated[
  str, tyro.conf.arg(metavar=f"{{{','.join(codecs.names())}}}|MODULE:FN")
]
Second = Literal["e4m3", "e5m2", "factored"]
# f32 rounds 0.99999998 to 1, and the bias correction would then divide by 0.
Decay = Annotated[float, Range(0, 0.9999999)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
  """The optimizer, the codec of its stored moments, and the learning rate.

  Attributes:
    lr: The peak learning rate.
    optimizer: How weights are updated. coat_muon orthogonalizes the updates of
      hidden matrices and scales them to the size of AdamW's updates. It updates
      all other parameters with AdamW.
    codec: How moments are stored between steps; package.module:function calls
      your function, which must return a MomentCodec.
    rounding: How 8-bit codecs round. With nearest, second moments stop changing
      if b2 is close to 1.
    group_size: How many values share a scale (and other statistics) in 8-bit
      codecs.
    second: The format of the second moment in codec coat. factored stores only
      the means of the moment's rows and columns, which halves the state.
    schedule: How the learning rate falls after the warmup.
    warmup: Number of steps in which the learning rate rises, or a share of all
      steps if below 1.
    min_lr_ratio: The final learning rate, as a share of lr.
    b1: Decay of the first moment; in coat_lion, the moment's weight in updates.
    b2: Decay of the second moment; in coat_lion, decay of the only moment.
    eps: Added to the square root of the second moment.
    momentum: In coat_muon, decay of the momentum of hidden matrices.
    weight_decay: Decoupled weight decay of all parameters except norms, biases
      and embeddings.
    grad_clip: Limit for the global norm of the gradients; see clip.
    clip: How gradients are clipped. global scales all gradients by one factor.
      share and adaptive scale the gradient of each parameter in each layer by a
      separate factor. share limits the norm of each of these gradients to
      grad_clip * r / N, where r is the gradient's norm and N the global norm,
      both from the previous step. adaptive does the same in the first 100
      steps, and then limits each norm to 1.05 times its running mean.

  Raises:
    ValueError: a value is outside its range, or the optimizer or the codec does
      not accept it.
  """

  lr: Positive
  optimizer: Literal["coat_adamw", "coat_lion", "coat_muon"] = fixed(
    "coat_adamw"
  )
  codec: Codec = converted("coat")
  rounding: Literal["stochastic", "nearest"] = converted("stochastic")
  group_size: Width = converted(128)
  second: Second = converted("e4m3")
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
    except TypeError as error:  # The user's function returned no codec.
      raise ValueError(str(error)) from error

  def moment_codec(self) -> codecs.MomentCodec:
    """Builds the codec, with the options that it accepts."""
    taken = options_of_codecs((self.codec,))[self.codec]
    options = {name: getattr(self, name) for name in taken}
    return codecs.build(self.codec, **options)

  def clipping(self) -> Clipping | None:
    """Builds the clipping rule; returns None for clip global."""
    return (
      None if self.clip == "global" else Clipping(self.clip, self.grad_clip)
    )

  def with_optimizer(self, optimizer: str, **options: Any) -> Self:
    """Selects an optimizer, and resets the options that it does not accept."""
    reset = unused(self, OPTIMIZERS, optimizer)
    options = reset | dict(optimizer=optimizer) | options
    return dataclasses.replace(self, **options)

  def warmup_steps(self, steps: int) -> int:
    """Returns the number of warmup steps in a run of `steps` steps."""
    return round(self.warmup * steps if self.warmup < 1 else self.warmup)


def options_of_codecs(names: Iterable[str] = ()) -> dict[str, list[str]]:
  """Lists the options that each known codec and each of `names` accepts."""
  return {
    name: [x for x in _CODEC_OPTIONS if x in codecs.options(name)]
    for name in (*codecs.names(), *names)
  }
