# SPDX-License-Identifier: Apache-2.0
"""Runs the how-to pages for Gemma and nanodo, in all variants they describe."""

import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.docs import howto
from tests.docs.pages import run_page

# Each test compiles a page's model several times.
pytestmark = pytest.mark.slow


def assert_learns_like(losses, expected, *, rtol: float):
  """Checks that the loss falls, and starts at the expected value."""
  howto.assert_learns(losses)
  np.testing.assert_allclose(losses[0], expected[0], rtol=rtol)


@pytest.mark.usefixtures("as_a_reader")
def test_gemma_trains_with_only_the_optimizer_or_with_fp8_layers():
  names = run_page("docs/howto/gemma.md")
  howto.check_gemma(names)
  make, train, mesh = names["make"], names["train"], names["mesh"]
  model, optimizer = make(names["Layers"](), mesh)
  losses = train(model, optimizer, mesh)
  howto.check_gemma_shares(model, optimizer)
  assert_learns_like(losses, names["losses"], rtol=0.02)

  one = jax.make_mesh((1, 1), mesh.axis_names, devices=jax.devices()[:1])
  losses = train(*make(names["fp8"], one), one)
  assert_learns_like(losses, names["losses"], rtol=1e-3)


@pytest.mark.usefixtures("as_a_reader")
def test_nanodo_trains_with_only_the_optimizer_or_with_fp8_layers():
  names = run_page("docs/howto/nanodo.md")
  howto.check_nanodo(names)
  config = names["DoConfig"]()

  def train(model, mesh):
    made = names["init_train_state"](model, mesh, jax.random.key(0))
    explicit = mesh.axis_types[0] == AxisType.Explicit
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
      return names["train"](*made[::-1], mesh)

  # In the original layers, q, k and v are three matrices.
  state, losses = train(names["TransformerDo"](config), names["mesh"])
  howto.check_nanodo_shares(state, encoded=7)
  howto.assert_learns(losses)

  # FSDP over two explicit axes, whose names the page's functions find in DATA.
  names["DATA"] = axes = ("data", "fsdp")
  model = names["TransformerDo"](config, names["FP8TBlock"], names["Embed"])
  state, losses = train(model, jax.make_mesh((4, 2), axes))
  howto.check_nanodo_shares(state, encoded=5)
  assert_learns_like(losses, names["losses"], rtol=1e-3)
