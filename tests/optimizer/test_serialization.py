# SPDX-License-Identifier: Apache-2.0
"""Tests saving states as integers, for libraries without FP8."""

import doctest
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from safetensors.flax import load_file, save_file

from coat_jax import coat_adamw
from coat_jax.optimizer import (
  abstract_state,
  check_stored,
  from_integers,
  serialization,
  to_integers,
)
from tests.comparing import assert_same_bits
from tests.matrices import quick
from tests.optimizer.solvers import CODECS, make, tree, types


def through_npz(state, path):
  leaves, treedef = jax.tree.flatten(state)
  np.savez(path, *leaves)
  with np.load(path) as file:
    return treedef.unflatten([file[f"arr_{i}"] for i in range(len(leaves))])


def through_safetensors(state, path):
  leaves, treedef = jax.tree.flatten(state)
  save_file({str(i): x for i, x in enumerate(leaves)}, path)
  loaded = load_file(path)
  return treedef.unflatten([loaded[str(i)] for i in range(len(leaves))])


FILES = {"npz": through_npz, "safetensors": through_safetensors}
CASES = [("npz", "coat"), ("npz", "bfloat16"), ("safetensors", "coat")]
CASES += [x for x in itertools.product(FILES, CODECS) if x not in CASES]


@pytest.mark.parametrize("file, name", quick(3, CASES))
def test_saved_states_are_restored_exactly(file, name, tmp_path):
  params, solver = tree(), make(name)
  update = jax.jit(solver.update)
  _, state = update(tree(1), solver.init(params), params)
  integers = jax.jit(to_integers)(state)
  assert all(x.dtype.isbuiltin == 1 for x in jax.tree.leaves(integers))
  read = FILES[file](integers, tmp_path / f"state.{file}")
  got = from_integers(read, jax.eval_shape(solver.init, params))
  assert_same_bits(jax.tree.map(jnp.asarray, got), state)
  assert_same_bits(update(tree(2), got, params), update(tree(2), state, params))


def test_numpy_cannot_read_fp8():
  # `to_integers` exists because NumPy restores an FP8 array as raw bytes.
  codes = np.asarray(jnp.ones(3, jnp.float8_e4m3fn))
  assert np.dtype(codes.dtype.str).kind == "V"


def test_integers_keep_shardings_and_other_leaves():
  mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
  where = {"w": NamedSharding(mesh, jax.P("x"))}
  solver = coat_adamw(1e-3)
  params = jax.device_put({"w": jnp.ones((64, 128))}, where)
  abstract = abstract_state(solver.init, params)
  state = jax.jit(
    solver.init, out_shardings=jax.tree.map(lambda x: x.sharding, abstract)
  )(params)
  integers = to_integers({"state": state, "bf16": jnp.ones(4, "bfloat16")})
  assert integers["bf16"].dtype == jnp.uint16
  assert integers["state"][0].mu.codes["w"].sharding == where["w"]
  assert integers["state"][0].mu.amax["w"] is state[0].mu.amax["w"]
  likewise = to_integers(abstract)[0].mu.codes["w"]
  assert (likewise.dtype, likewise.sharding) == (jnp.uint8, where["w"])
  back = from_integers(integers["state"], abstract)
  assert_same_bits(back, state)
  assert back[0].mu.codes["w"].sharding == where["w"]
  key = {"key": jax.random.key(0), "none": None, "number": 3}
  assert to_integers(key) == key
  assert types(from_integers(key["key"], key["key"])) == types(key["key"])


def test_integers_of_another_state_are_refused():
  params = tree()
  state = to_integers(make("log8").init(params))
  like = jax.eval_shape(make("coat").init, params)
  with pytest.raises(ValueError, match="must have the structure of like"):
    from_integers(state, like)
  other = jax.eval_shape(make("coat").init, {**params, "x": jnp.ones(3)})
  with pytest.raises(ValueError, match=r"got float32\[\] at '0/mu/codes/x'"):
    from_integers(to_integers(make("coat").init(params)), other)


def test_checkpoint_of_another_codec_is_refused(tmp_path):
  # If shapes are equal, Orbax casts the codes, which then mean something else.
  params = tree()
  states = {name: jax.eval_shape(make(name).init, params) for name in CODECS}
  extra = {"key": jax.random.key(0), "step": 3}
  with ocp.StandardCheckpointer() as checkpointer:
    for name in ("coat", "log8"):
      path = tmp_path / name
      checkpointer.save(path, {"opt": make(name).init(params), **extra})
      checkpointer.wait_until_finished()
      stored = checkpointer.metadata(path)
      check_stored(stored, {"opt": states[name], **extra})
      check_stored(stored.item_metadata["opt"], states[name])
      # Rounding is not part of a format.
      for other in set(CODECS) - {name, "coat_nearest"}:
        with pytest.raises(ValueError, match="at 'opt/0/[mn]u/.*and codec"):
          check_stored(stored, {"opt": states[other], **extra})
    checkpointer.restore(path, {"opt": states["coat"], **extra})
  wider = jax.eval_shape(make("log8").init, {**params, "y": jnp.ones(3)})
  with pytest.raises(ValueError, match="at 'opt/0/mu/.*has nothing"):
    check_stored(stored, {"opt": wider})


def test_missing_metadata_of_a_fresh_checkpoint_manager_is_reported(
  tmp_path,
):
  state = {"a": jnp.ones(3)}
  with ocp.CheckpointManager(tmp_path) as manager:
    manager.save(0, args=ocp.args.StandardSave(state))
  with ocp.CheckpointManager(tmp_path) as manager:
    stored = manager.item_metadata(0)
  with pytest.raises(ValueError, match="got none in a NoneType.*item_handlers"):
    check_stored(stored, state)
  handlers = ocp.StandardCheckpointHandler()
  with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as manager:
    check_stored(manager.item_metadata(0), state)


def test_serialization_examples_run():
  assert not doctest.testmod(serialization).failed
