# SPDX-License-Identifier: Apache-2.0
"""Adds the optimizer `coat_adamw` and FP8 matmuls to MaxText.

The patches in this folder add the options `opt_type=coat_adamw` and
`quantization=coat`, which call the functions in this file. Apply the patches:

  cd SITE_PACKAGES && cat coat_jax/integrations/maxtext_*.patch | patch -p1
"""

from collections.abc import Callable
from typing import Any

import optax
import qwix

from coat_jax import coat_adamw
from coat_jax.integrations.qwix import CoatProvider

# Matches the modules in the decoder's layers, except routers (`gate`).
_LAYERS = r"decoder/.*layers(?!.*/gate$).*"


def get_optimizer(
  config: Any,
  learning_rate_schedule: optax.Schedule,
  mask: Callable[[optax.Params], Any] | None,
) -> optax.GradientTransformationExtraArgs:
  """Returns `coat_adamw` with MaxText's settings for AdamW.

  Args:
    config: MaxText's configuration. The settings `adam_*` are used; `mu_dtype`
      is ignored, because moments are stored in FP8.
    learning_rate_schedule: MaxText's schedule.
    mask: the result of MaxText's `get_adamw_mask`; selects the weights that
      decay.
  """
  return coat_adamw(
    learning_rate_schedule,
    b1=config.adam_b1,
    b2=config.adam_b2,
    eps=config.adam_eps,
    eps_root=config.adam_eps_root,
    weight_decay=config.adam_weight_decay,
    mask=mask,
  )


def get_qt_provider() -> CoatProvider:
  """Returns a qwix provider that runs the decoder layers' matmuls in FP8."""
  return CoatProvider([qwix.QuantizationRule(module_path=_LAYERS)])
