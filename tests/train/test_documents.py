# SPDX-License-Identifier: Apache-2.0
"""Training steps on documents that are packed into sequences.

The oracle has one document per row, followed by padding, and sums the
log-softmax of the decoder's logits in NumPy.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.train.steps import EXACT, SMALL, STEPS, TOKENS, Trained, on
from train import step

pytestmark = pytest.mark.slow

MESH = "data=2,fsdp=2,tensor=2"
# Lengths of the documents in each row of 33 tokens; the rest is padding.
LENGTHS = [
  *([33], [20, 13], [11, 11, 11], [5, 9, 3, 16]),
  *([30], [2, 2, 12], [17, 8], [7]),
]
# As in a chat, the second half of each document is an answer, except in this
# row, whose documents have no targets.
WITHOUT_TARGETS = 3


def packed():
  """Returns rows of packed documents, with their targets."""
  draw = np.random.default_rng(1)
  tokens = np.zeros((8, 33), np.int32)
  segments, is_target = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
  for row, lengths in enumerate(LENGTHS):
    start = 0
    for number, length in enumerate(lengths):
      end = start + length
      tokens[row, start:end] = draw.integers(0, 256, length)
      segments[row, start:end] = number + 1
      is_target[row, start + length // 2 : end] = row != WITHOUT_TARGETS
      start = end
  return dict(tokens=tokens, segments=segments, is_target=is_target)


ROWS = packed()


def one_per_row():
  """Returns each document in its own row, its targets and (row, segment)."""
  tokens, is_target, places = [], [], []
  for row in range(8):
    for number in range(1, ROWS["segments"][row].max() + 1):
      (where,) = np.nonzero(ROWS["segments"][row] == number)
      pad = (0, 33 - len(where))
      tokens.append(np.pad(ROWS["tokens"][row, where], pad))
      is_target.append(np.pad(ROWS["is_target"][row, where], pad))
      places.append((row, number))
  return np.stack(tokens), np.stack(is_target), places


@pytest.fixture(scope="module")
def alone():
  """Returns each document's (row, segment), nats and number of targets."""
  tokens, is_target, places = one_per_row()
  run = Trained(EXACT)
  params = step.initial_state(EXACT, run.optimizer).params
  graph = step.build_graph(EXACT)
  compute = jax.jit(lambda p, tokens: nnx.merge(graph, p).logits(tokens))
  logits = np.asarray(compute(params, tokens[:, :-1])).astype(np.float64)
  norm = np.log(np.sum(np.exp(logits), axis=-1))
  at = np.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
  counted = is_target[:, 1:]
  nats = np.sum((norm - at) * counted, axis=1)
  return places, nats, np.sum(counted, axis=1)


def of_document(row, number):
  """Returns all packed rows, with the targets of only this document."""
  where = np.zeros((8, 1), bool)
  where[row] = True
  own = where & (ROWS["segments"] == number)
  return {**ROWS, "is_target": ROWS["is_target"] & own}


def mean(alone):
  return sum(alone[1]) / sum(alone[2])


@pytest.mark.parametrize("mesh, parts", [("", 4), ("", 1), (MESH, 2)])
def test_packed_and_single_documents_have_equal_losses(mesh, parts, alone):
  run = Trained(on(EXACT, mesh), ROWS)
  state = step.initial_state(run.config, run.optimizer, run.mesh)
  evaluate = step.eval_step(step.build_graph(run.config), accumulate=parts)
  program = step.compile_on(run.mesh, evaluate, run.abstract.params, run.batch)

  def found(rows):
    return program(state.params, jax.device_put(rows, run.where))

  for (row, number), nats, count in zip(*alone, strict=True):
    one = found(of_document(row, number))
    assert int(one.targets) == count
    assert float(one.loss) == pytest.approx(nats / max(count, 1), abs=1e-5)
  assert min(alone[2]) == 0 < max(alone[2])
  # All targets have equal weight, whichever microbatch they are in.
  assert float(found(ROWS).loss) == pytest.approx(mean(alone), abs=1e-5)


# No gradient norm reaches this limit, so nothing is clipped.
UNCLIPPED = dataclasses.replace(EXACT.optim, grad_clip=1e9)
GLOBAL = dataclasses.replace(EXACT, optim=UNCLIPPED)
LEAN = dataclasses.replace(
  EXACT,
  optim=dataclasses.replace(UNCLIPPED, clip="share"),
  optimizer_in_backward=True,
)


@pytest.fixture(scope="module")
def trained():
  return Trained(GLOBAL, ROWS).run()


@pytest.mark.parametrize(
  "config",
  [
    dataclasses.replace(GLOBAL, accumulate=4),
    on(LEAN, "fsdp=8"),
    LEAN,
    on(GLOBAL, MESH, accumulate=2),
    on(LEAN, MESH),
  ],
)
def test_steps_equal_those_of_one_microbatch_on_one_device(
  config, alone, trained
):
  run = Trained(config, ROWS).run()
  assert run.losses[0] == pytest.approx(mean(alone), abs=1e-5)
  np.testing.assert_allclose(run.losses, trained.losses, rtol=0, atol=1e-5)
  assert run.losses[0] - run.losses[-1] > 0.1
  assert int(run.metrics.targets) == sum(alone[2])
  padding = np.mean(ROWS["segments"][:, :-1] == 0)
  assert float(run.metrics.padding) == pytest.approx(padding)


def test_tokens_in_a_dict_give_the_program_of_plain_tokens():
  run, named = (Trained(EXACT, rows) for rows in (TOKENS, dict(tokens=TOKENS)))
  program = run.jaxpr()
  assert str(program) == str(named.jaxpr())
  # The outputs are the state and four metrics.
  assert len(program.outvars) == len(jax.tree.leaves(run.abstract)) + 4
  evaluate = step.eval_step(step.build_graph(EXACT))
  out = jax.eval_shape(evaluate, run.abstract.params, run.batch)
  assert jax.tree.leaves(out) == [jax.ShapeDtypeStruct((), jnp.float32)]


@pytest.mark.parametrize("mesh", ["", MESH])
def test_fp8_learns_packed_documents_as_f32_does(mesh, trained):
  optim = dataclasses.replace(SMALL.optim, grad_clip=1e9)
  config = dataclasses.replace(on(SMALL, mesh), optim=optim)
  run = Trained(config, ROWS).run()
  assert len(run.losses) == STEPS
  # test_mesh uses the same bound for plain tokens.
  np.testing.assert_allclose(run.losses, trained.losses, rtol=0, atol=3e-3)
