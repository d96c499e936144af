# SPDX-License-Identifier: Apache-2.0
"""Tests forms of the optimizer's kernel that are not the default."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.pallas.mosaic import fp8, leaf_step
from coat_jax.pallas.mosaic.registers import Instructions
from tests.pallas.mosaic import test_adam
from tests.pallas.mosaic.test_adam import CODECS, by_kernel, numbers, problem


def test_warpgroups_that_take_turns_compute_all_tiles(monkeypatch):
  # Of 17 tiles, five of six warpgroups process three, and one processes two.
  codec = CODECS["coat_nearest"]
  args = *problem(codec, jnp.float32, shape=(17, 1024)), *numbers(1)
  want = by_kernel(codec, *args)
  monkeypatch.setattr(leaf_step, "_WARPGROUPS", 3)
  jax.tree.map(np.testing.assert_array_equal, by_kernel(codec, *args), want)


@pytest.mark.parametrize("root", [1 / 16, 0.4, 1.0, 14.32, 16.0])
def test_powers_from_tables_equal_those_of_decoded_numbers(root):
  codes = np.tile(np.arange(0x80, dtype=np.uint8) % 0x7F, (8, 1))
  y = codes.view(jnp.float8_e4m3fn).astype(np.float64)
  got = Instructions(interpret=True).decoded(
    jnp.asarray(codes), jnp.full(8, root, jnp.float32)
  )
  np.testing.assert_allclose(got, (y / 448) ** root, rtol=2e-5, atol=2**-113)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coat", "coat_e8m0"])
def test_second_moment_from_tables_matches_definition(monkeypatch, name):
  monkeypatch.setattr(fp8, "_LOOKS_UP_SECOND", True)
  jax.clear_caches()  # The switch is not a key of the cache.
  test_adam.test_interpreted_kernel_matches_definition(name, jnp.bfloat16)
  jax.clear_caches()
