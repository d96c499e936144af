# SPDX-License-Identifier: Apache-2.0
"""Tests the optimizer's kernel with warpgroups that take turns.

Its results must equal, bit for bit, those of a kernel with one program per
tile. Other tests compare both with the definition.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from coat_jax import codecs
from coat_jax.pallas.mosaic import device, leaf_step
from tests.matrices import quick
from tests.pallas.mosaic.test_adam import by_kernel, numbers, problem
from tests.pallas.mosaic.test_weights import split_problem


def compare(monkeypatch, codec, args):
  """Compares results with and without turns."""
  interpret_pallas_call.reset_gpu_interpret_mode_state()
  results = []
  for turns in (False, True):
    monkeypatch.setattr(leaf_step, "_takes_turns", lambda *_, x=turns: x)
    results.append(by_kernel(codec, *args))
  jax.tree.map(np.testing.assert_array_equal, *results)
  assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize("tiles", quick(1, [17, 1, 14, 28]))
def test_warpgroups_compute_all_tiles(monkeypatch, tiles):
  # Two programs run, or one for a single tile. Each has seven warpgroups.
  codec = codecs.coat(rounding="nearest")
  args = problem(codec, jnp.float32, shape=(tiles, 1024))
  compare(monkeypatch, codec, (*args, *numbers(1)))


def test_one_layer_is_updated(monkeypatch):
  codec = codecs.coat()
  p, g, stored = problem(codec, jnp.bfloat16, shape=(3, 16, 1024))
  compare(
    monkeypatch, codec, (p, g[2:], stored, *numbers(1, layer=jnp.int32(2)))
  )


@pytest.mark.parametrize("name", quick(1, ["log8", "coat_e8m0"]))
def test_24_bit_weights_are_updated(monkeypatch, name):
  codec = getattr(codecs, name)()
  args = split_problem(codec, shape=(16, 1024))
  compare(monkeypatch, codec, (*args, *numbers(1)))


def test_indices_may_have_64_bits(monkeypatch):
  codec = codecs.coat()
  args = problem(codec, jnp.float32, shape=(16, 1024))
  with jax.enable_x64(True):
    compare(monkeypatch, codec, (*args, *numbers(1)))


def test_updates_are_computed_without_a_parameter(monkeypatch):
  codec = codecs.coat()
  _, g, stored = problem(codec, jnp.bfloat16, shape=(16, 1024))
  compare(monkeypatch, codec, (None, g, stored, *numbers(1)))


@pytest.mark.parametrize(
  "codec, dtype, takes_turns",
  [
    (codecs.coat(), jnp.float32, True),
    (codecs.coat(), jnp.bfloat16, True),
    (codecs.coat_e8m0(), jnp.float32, True),
    (codecs.coat(rounding="nearest"), jnp.bfloat16, False),
    (codecs.coat(second="factored"), jnp.bfloat16, False),
    (codecs.fp8(), jnp.bfloat16, False),
    (codecs.log8(), jnp.float32, False),
    (codecs.log8(), jnp.bfloat16, True),
  ],
)
def test_steps_take_turns_where_it_is_faster(codec, dtype, takes_turns):
  assert leaf_step._takes_turns(codec.groups, dtype) is takes_turns


def test_only_hoppers_warpgroups_take_turns(monkeypatch):
  monkeypatch.setattr(device, "why_not_hopper", lambda: "got 12.0")
  assert not leaf_step._takes_turns(codecs.coat().groups, jnp.bfloat16)
