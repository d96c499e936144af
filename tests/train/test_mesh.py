# SPDX-License-Identifier: Apache-2.0
"""Training on a mesh: options, errors, and losses equal to one device's."""

import re

import jax
import numpy as np
import pytest
from jax import P

from coat_jax.models import param_shardings
from tests.matrices import quick
from tests.train.runs import run
from tests.train.steps import (
  EXACT,
  MESHES,
  SMALL,
  TOKENS,
  Trained,
  gpt2,
  largest_difference,
  on,
)
from train import mesh as meshes
from train import step
from train.presets import PRESETS


@pytest.fixture(scope="module")
def exact():
  return Trained(EXACT).run()


@pytest.fixture(scope="module", params=quick(0, MESHES[::-1]))
def exact_on_mesh(request):
  return Trained(on(EXACT, request.param)).run()


@pytest.mark.parametrize(
  "text, sizes",
  [
    ("", {}),
    ("data=2,fsdp=4,tensor=1", dict(data=2, fsdp=4, tensor=1)),
    (" tensor=2, fsdp=4", dict(data=1, fsdp=4, tensor=2)),
    ("expert=4,tensor=2", dict(data=1, fsdp=1, expert=4, tensor=2)),
    ("expert=1,fsdp=8", dict(data=1, fsdp=8, tensor=1)),
  ],
)
def test_mesh_is_parsed_and_made(text, sizes):
  assert meshes.parse_mesh(text) == sizes
  if sizes:
    mesh = meshes.make_mesh(sizes)
    assert dict(mesh.shape) == sizes
    assert mesh.axis_names == tuple(n for n in meshes.MESH_AXES if n in sizes)
    # Devices that exchange the most data are neighbours.
    assert [d.id for d in mesh.devices.flat] == list(range(8))


@pytest.mark.parametrize(
  "text, words",
  [
    ("tp=2", "expected axes data, fsdp, expert, tensor, got 'tp'"),
    ("fsdp", "one size per axis, from 1 to 65536, got 'fsdp'"),
    ("fsdp=0", "one size per axis, from 1 to 65536, got 'fsdp=0'"),
    ("fsdp=2,fsdp=4", "one size per axis, from 1 to 65536, got 'fsdp=4'"),
    ("fsdp=65537", "got 'fsdp=65537'"),
    ("fsdp=" + "9" * 400, "got 'fsdp=99999"),
    ("fsdp=-1", "got 'fsdp=-1'"),
    ("fsdp=4,", "got ''"),
  ],
)
def test_malformed_mesh_raises(text, words):
  with pytest.raises(ValueError, match=words):
    meshes.parse_mesh(text)


@pytest.mark.parametrize(
  "text, fits",
  [
    ("fsdp=4", "data=1,fsdp=8,tensor=1"),
    ("fsdp=16", "data=1,fsdp=8,tensor=1"),
    ("data=2,fsdp=3,tensor=2", "data=2,fsdp=2,tensor=2"),
    ("data=3,tensor=3", "data=1,fsdp=8,tensor=1"),
    ("fsdp=3,expert=6", "data=1,fsdp=4,expert=2,tensor=1"),
  ],
)
def test_mesh_of_wrong_size_raises_and_suggests_one_that_fits(text, fits):
  sizes = meshes.parse_mesh(text)
  with pytest.raises(ValueError, match=f"got 8; {fits} would fit"):
    meshes.make_mesh(sizes)
  assert meshes.make_mesh(meshes.parse_mesh(fits)).size == 8


@pytest.mark.parametrize(
  "mesh, options, words",
  [
    ("tensor=4", {}, "tensor must divide num_kv_heads, got tensor=4 and 2; "),
    ("tensor=3", {}, "tensor must divide num_heads, .* 1, 2 would fit"),
    ("tensor=2", dict(seq=33), "tensor must divide seq, got tensor=2 and 33"),
    ("fsdp=3", dict(batch=9), "fsdp must divide d_model, got fsdp=3 and 64"),
    (
      "fsdp=64,tensor=2",
      dict(batch=64),
      "fsdp must divide d_model / tensor=2, got fsdp=64 and 32; fsdp of 1, 2",
    ),
    (
      "data=2,fsdp=2",
      dict(accumulate=4),
      r"data \* fsdp \* accumulate = 2 \* 2 \* 4 = 16, got 8; 16 would fit",
    ),
    ("fsdp=4", dict(batch=9), "= 4, got 9; 8 would fit"),
    ("", dict(accumulate=3), "= 1 \\* 1 \\* 3 = 3, got 8; 6 would fit"),
    (
      "tensor=2",
      dict(activation_group_size=24),
      "d_ff / tensor .* got 256 / 2 = 128 and 24; .* of 8 would fit",
    ),
    ("", dict(grad_reduce="bfloat16"), "grad_reduce applies to a run on a"),
    ("", dict(distributed=True), "distributed applies to a run on a mesh"),
    ("expert=2", {}, "needs a mixture of experts, got expert=2 for a model"),
    ("pipe=2", {}, "expected axes data, fsdp, expert, tensor"),
  ],
)
def test_config_rejects_meshes_that_do_not_fit(mesh, options, words):
  with pytest.raises(ValueError, match=words):
    on(SMALL, mesh, **options)


def test_fsdp_splits_only_whole_tiles():
  config = PRESETS["llama2_7b"]()  # d_ff is 86 tiles of 128.
  on(config, "fsdp=2", recipe="fp8_block")
  on(config, "data=8,fsdp=1", recipe="fp8_block")
  words = "got d_ff / fsdp = 11008 / 4 = 2752; fsdp of 1, 2 would fit"
  with pytest.raises(ValueError, match=words):
    on(config, "fsdp=4", recipe="fp8_block")
  # In a model with experts, only attention weights have tiles.
  on(PRESETS["qwen3_30b_a3b"](), "fsdp=16", recipe="fp8_block")


@pytest.mark.parametrize(
  "options, words",
  [
    (dict(mesh="fsdp=4", batch=4), "is for 4 devices, got 8; data=1,fsdp=8"),
    (dict(mesh="fsdp=8", batch=4), "fsdp * accumulate = 1 * 8 * 1 = 8, got 4"),
    (
      dict(mesh="fsdp=8", batch=8, recipe="fp8_block"),
      "whole tiles of 128 rows of each weight on a device, got d_model / fsdp "
      "= 64 / 8 = 8; fsdp of 1 would fit, with the other devices along data",
    ),
    # Each group of 128 columns of gate_up would span two devices.
    (
      dict(mesh="fsdp=2,tensor=4", batch=2, model__num_kv_heads=4)
      | dict(model__num_heads=4, optim__group_size=128),
      "each device must hold whole groups",
    ),
  ],
)
def test_impossible_mesh_is_reported_and_changes_nothing(
  tmp_path, capfd, options, words
):
  assert run(tmp_path / "out", **options) == 2
  errors = " ".join(capfd.readouterr().err.replace("│", " ").split())
  assert words in errors and "Traceback" not in errors
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", quick(0, PRESETS))
def test_presets_are_sharded_in_whole_groups(name):
  config = PRESETS[name]()
  mesh = meshes.make_mesh(dict(data=1, fsdp=8, tensor=1))
  # This raises if any device would have part of a group.
  state = step.abstract_state(config, step.build_optimizer(config), mesh)
  leaves = zip(
    step.leaf_names(state.params),
    jax.tree.leaves(state.params),
    jax.tree.leaves(state.optimizer.mu.codes),
    strict=True,
  )
  for path, param, codes in leaves:
    assert codes.sharding == param.sharding
    part = param.sharding.shard_shape(param.shape)
    whole = ("norm/scale", "bias", "router")
    split = 1 if path.endswith(whole) else 8
    assert np.prod(part) * split == param.size, path
    assert part[-1] == param.shape[-1], path


@pytest.mark.slow
def test_losses_of_gpt2_equal_those_of_one_device():
  mesh = MESHES[1]
  want = Trained(gpt2(EXACT)).run()
  got = Trained(on(gpt2(EXACT), mesh)).run()
  jax.tree.map(
    np.testing.assert_array_equal, got.initial.params, want.initial.params
  )
  assert want.losses[0] - want.losses[-1] > 0.1
  # The order of f32 sums over devices differs.
  assert largest_difference(got, want) <= 1e-5
  # The last test of this file explains the error of FP8.
  fp8 = Trained(on(gpt2(SMALL), mesh)).run()
  assert largest_difference(fp8, want) <= 0.01


def test_parameters_are_sharded_over_a_mesh_of_three_axes():
  config = on(SMALL, "data=2,fsdp=2,tensor=2")
  mesh = meshes.make_mesh(config.mesh_sizes)
  params = step.abstract_state(config, step.build_optimizer(config)).params
  where = param_shardings(mesh, params)
  got = dict(
    zip(
      step.leaf_names(params),
      (leaf.spec for leaf in jax.tree.leaves(where)),
      strict=True,
    )
  )
  rows = ("tensor", "fsdp")
  assert got == {
    "embedding": P(rows, None),
    "head": P("fsdp", "tensor"),
    "layers/attention/out/kernel": P(None, rows, None),
    "layers/attention/qkv/linear/kernel": P(None, "fsdp", "tensor"),
    "layers/attention/qkv/norm/scale": P(),
    "layers/mlp/down/kernel": P(None, rows, None),
    "layers/mlp/gate_up/kernel": P(None, "fsdp", None, "tensor"),
    "layers/mlp/norm/scale": P(),
    "norm/scale": P(),
  }
  assert meshes.batch_sharding(mesh).spec == P(("data", "fsdp"))


def test_initial_state_equals_that_of_one_device(exact, exact_on_mesh):
  jax.tree.map(
    np.testing.assert_array_equal, exact_on_mesh.initial, exact.initial
  )


def test_step_keeps_the_shardings_of_the_state(exact_on_mesh):
  for before, after in zip(
    jax.tree.leaves(exact_on_mesh.abstract),
    jax.tree.leaves(exact_on_mesh.state),
    strict=True,
  ):
    assert after.sharding == before.sharding
    part = before.sharding.shard_shape(before.shape)
    assert after.addressable_shards[0].data.shape == part


def test_losses_equal_those_of_one_device(exact, exact_on_mesh):
  # A different summation order changes a loss of 5.5 by a few ulps (5e-7 each).
  # Adam amplifies such differences where a gradient is near 0.
  assert largest_difference(exact_on_mesh, exact) <= 1e-5
  assert exact.losses[-1] < exact.losses[0] - 0.1


def collectives(program):
  """Yields the name and shape of each result of a program's collectives."""
  found = re.findall(
    r"= (\S+|\(.*?\)) (all-gather|all-reduce|reduce-scatter|all-to-all)\(",
    program.as_text(),
  )
  for shapes, name in found:
    for sizes in re.findall(r"\w+\[([\d,]*)\]", shapes):
      yield name, tuple(int(n) for n in sizes.split(",") if n not in ("", "1"))


def test_logits_do_not_move_and_vocabulary_weights_move_once(exact_on_mesh):
  found = list(collectives(exact_on_mesh.program))
  tensor = exact_on_mesh.mesh.shape["tensor"]
  assert not [s for _, s in found if len(s) == 3 and s[-1] in (384, 192)]
  gathered = [s for name, s in found if name == "all-gather"]
  assert gathered.count((384, 64)) == 1, "the embedding"
  assert gathered.count((64, 384 // tensor)) == 1, "the head"


@pytest.mark.slow
def test_evaluation_in_bf16_equals_that_of_one_device(exact):
  losses = []
  for text in ("", *MESHES):
    run = Trained(on(SMALL, text, evaluation="bf16"))
    params = run.abstract.params
    program = step.compile_on(
      run.mesh,
      step.eval_step(step.build_graph(run.config)),
      params,
      run.batch,
    )
    params = jax.tree.map(
      lambda x, like: jax.device_put(x, like.sharding),
      exact.initial.params,
      params,
    )
    found = program(params, jax.device_put(TOKENS, run.where))
    losses.append(float(found.loss))
  # All runs have the same initial weights. Logits are below 1, where rounding
  # to BF16 changes them by at most 2^-9.
  assert losses == pytest.approx([exact.losses[0]] * 3, abs=2**-9)


@pytest.mark.slow
def test_fp8_losses_on_a_mesh_are_within_the_error_of_fp8(exact):
  # A mesh does not change scales of whole tensors, but matmuls have a different
  # summation order, so a value between two codes may be rounded to the other
  # one. Over five steps, losses on a mesh differed by 4e-4 from those on one
  # device, and FP8 losses by 1.5e-3 from f32 losses.
  one, mesh = (Trained(on(SMALL, mesh)).run() for mesh in ("", MESHES[1]))
  assert largest_difference(one, exact) <= 3e-3
  assert largest_difference(mesh, one) <= 1.5e-3
