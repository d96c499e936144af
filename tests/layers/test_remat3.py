# SPDX-License-Identifier: Apache-2.0
"""Tests what `jax.checkpoint` saves with the option jax_remat3.

JAX 0.11.2 reads the option jax_custom_vjp3 when coat_jax is imported, so each
test starts a new process. The process runs two tests of `test_remat`.
"""

import os
import subprocess
import sys

import pytest
from jax import ad_checkpoint

from tests.docs.pages import ROOT

PROGRAM = """
from tests.layers import test_remat as tests
tests.test_saved_arrays_are_codes_scales_and_other_arguments()
tests.test_block_inputs_include_those_of_post_norms("rms")
"""
# Before 0.11.2, JAX cannot name the arrays that a custom gradient saves.
IS_SUPPORTED = hasattr(ad_checkpoint, "checkpoint_name_fwd")
ERROR = "ValueError: fp8_remat: jax_remat3 needs jax_custom_vjp3 and JAX 0.11.2"


@pytest.mark.slow
@pytest.mark.parametrize("has_custom_vjp3", [False, True])
def test_codes_are_kept_or_the_option_is_refused(has_custom_vjp3):
  options = {"JAX_REMAT3": "1", "JAX_CUSTOM_VJP3": str(int(has_custom_vjp3))}
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM],
    cwd=ROOT,
    env=os.environ | options,
    capture_output=True,
    text=True,
  )
  if has_custom_vjp3 and IS_SUPPORTED:
    assert done.returncode == 0, done.stderr
  else:
    assert done.returncode == 1 and ERROR in done.stderr
