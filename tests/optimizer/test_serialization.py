# SPDX-License-Identifier: Apache-2.0
"""States written as integers by libraries without FP8, and read again."""

import doctest
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from safetensors.flax import load_file, save_file

from coat_jax import coat_adamw, from_integers, to_integers
from coat_jax.optimizer import serialization
from coat_jax.sharding import abstract_state
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
def test_states_are_read_as_they_were_written(file, name, tmp_path):
  params, solver = tree(), make(name)
  update = jax.jit(solver.update)
  _, state = update(tree(1), solver.init(params), params)
  integers = jax.jit(to_integers)(state)
  assert all(x.dtype.isbuiltin == 1 for x in jax.tree.leaves(integers))
  read = FILES[file](integers, tmp_path / f"state.{file}")
  got = from_integers(read, jax.eval_shape(solver.init, params))
  assert_same_bits(jax.tree.map(jnp.asarray, got), state)
  assert_same_bits(update(tree(2), got, params), update(tree(2), state, params))


def test_numpy_reads_no_fp8():
  # Why there are these functions: an array of FP8 comes back as raw bytes.
  codes = np.asarray(jnp.ones(3, jnp.float8_e4m3fn))
  assert np.dtype(codes.dtype.str).kind == "V"


def test_views_keep_shardings_and_other_leaves():
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
  assert integers["state"][0].mu_codes["w"].sharding == where["w"]
  assert integers["state"][0].mu_amax["w"] is state[0].mu_amax["w"]
  likewise = to_integers(abstract)[0].mu_codes["w"]
  assert (likewise.dtype, likewise.sharding) == (jnp.uint8, where["w"])
  back = from_integers(integers["state"], abstract)
  assert_same_bits(back, state)
  assert back[0].mu_codes["w"].sharding == where["w"]
  key = {"key": jax.random.key(0), "none": None, "number": 3}
  assert to_integers(key) == key
  assert types(from_integers(key["key"], key["key"])) == types(key["key"])


def test_another_state_is_refused():
  params = tree()
  state = to_integers(make("log8").init(params))
  like = jax.eval_shape(make("coat").init, params)
  with pytest.raises(
    ValueError, match=r"float8_e4m3fn\[2, 3, 10\].*as uint8, got int8.*layer/w"
  ):
    from_integers(state, like)
  other = jax.eval_shape(make("coat").init, {**params, "x": jnp.ones(3)})
  with pytest.raises(ValueError, match=r"got float32\[\] at '0/mu_codes/x'"):
    from_integers(to_integers(make("coat").init(params)), other)


def test_serialization_examples_run():
  assert not doctest.testmod(serialization).failed
