# SPDX-License-Identifier: Apache-2.0
"""The how-tos' models in all ways that their pages name.

The pages' own way, one each, is run with every page (`test_pages`).
"""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.docs import howto
from tests.docs.pages import run_page

# Each compiles a page's model several times.
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def as_a_reader():
  with jax.numpy_rank_promotion("allow"):
    yield


def assert_same_start(losses, expected):
  """The first loss: FP8 products differ by their sums' order alone."""
  howto.assert_learns(losses)
  np.testing.assert_allclose(losses[0], expected[0], rtol=1e-3)


def test_gemma_trains_with_any_of_the_replacements():
  names = run_page("docs/howto/gemma.md")
  axes = ("fsdp", "tensor")
  plain = names["Layers"]()
  for layers in (plain, plain._replace(Linear=names["Linear"])):
    mesh = jax.make_mesh((4, 2), axes)
    model, optimizer = names["make"](layers, mesh)
    losses = names["train"](model, optimizer, mesh)
    howto.check_gemma_shares(model, optimizer)
    # From the same weights; BF16 and FP8 differ by rounding.
    np.testing.assert_allclose(losses[0], names["losses"][0], rtol=0.02)
    howto.assert_learns(losses)


@pytest.mark.parametrize("sizes", [(1, 1), (8, 1), (2, 4)])
def test_gemma_trains_on_other_meshes(sizes):
  names = run_page("docs/howto/gemma.md")
  if sizes == (2, 4):
    names["KV_HEADS"] = 4
    names["HEADS"] = 8
  count = sizes[0] * sizes[1]
  mesh = jax.make_mesh(
    sizes, ("fsdp", "tensor"), devices=jax.devices()[:count]
  )
  model, optimizer = names["make"](names["fp8"], mesh)
  losses = names["train"](model, optimizer, mesh)
  if sizes != (2, 4):
    assert_same_start(losses, names["losses"])
  howto.assert_learns(losses)
  howto.assert_shares(
    jax.tree.leaves(optimizer.opt_state), parts=count, vector_parts=sizes[1]
  )


def test_nanodo_trains_with_either_replacement_and_on_one_device():
  names = run_page("docs/howto/nanodo.md")
  mesh, config = names["mesh"], names["DoConfig"]()
  # The optimizer alone: q, k and v are three matrices.
  plain = names["TransformerDo"](config)
  state, losses = names["train"](plain, mesh)
  howto.assert_learns(losses)
  howto.check_nanodo_shares(state, encoded=7)
  one = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
  _, losses = names["train"](names["model"], one)
  assert_same_start(losses, names["losses"])


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_nanodo_trains_with_fsdp_over_two_axes(kind):
  names = run_page("docs/howto/nanodo.md")
  names["DATA"] = axes = ("data", "fsdp")
  mesh = jax.make_mesh((4, 2), axes, axis_types=(kind,) * 2)
  model = names["TransformerDo"](
    names["DoConfig"](), names["FP8TBlock"], names["Embed"]
  )
  state, losses = names["train"](model, mesh)
  assert_same_start(losses, names["losses"])
  howto.check_nanodo_shares(state, encoded=5)
