# SPDX-License-Identifier: Apache-2.0
"""Converts runs to and from checkpoints of optax's AdamW."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from coat_jax import scale_by_coat_adam
from coat_jax.optimizer import from_plain_state, to_plain_state
from coat_jax.optimizer.masks import leaf_paths
from train import step as steps
from train import weights
from train.config import TrainConfig
from train.optimizers import learning_rate
from train.run.checkpoint import restore_state
from train.run.imported import create_run, newest_checkpoint
from train.run.writing import write_tree
from train.step import TrainState


def export_adamw(run: Path, out: Path) -> int:
  """Exports a run's newest undamaged checkpoint for optax; returns its step."""
  path, step, config = newest_checkpoint("export", run, out)
  if config.optim.optimizer != "coat_adamw":
    raise ValueError(
      "export: the run's optim.optimizer must be coat_adamw, got "
      f"{config.optim.optimizer}; use export-hf to export only its weights"
    )
  optimizer = steps.build_optimizer(config)
  abstract = steps.abstract_state(config, optimizer)
  state = restore_state(path, step, abstract)
  adam, low = weights.without_low(state.optimizer)
  adam = jax.jit(to_plain_state)(adam)
  params = jax.jit(weights.load)(state.params, low)
  # The structure of optax.adamw's state depends on the schedule and the mask.
  adamw = optax.adamw(learning_rate(config), mask=steps.decays)
  opt_state = jax.eval_shape(adamw.init, params)
  schedule = optax.ScaleByScheduleState(adam.count)
  opt_state = (adam, opt_state[1], schedule)
  write_tree(out, {"params": params, "opt_state": opt_state})
  return step


def import_adamw(source: Path, config: TrainConfig) -> int:
  """Turns a checkpoint of optax's AdamW into a run; returns its step."""
  if config.optim.optimizer != "coat_adamw":
    raise ValueError(
      "import: optim.optimizer must be coat_adamw, got "
      f"{config.optim.optimizer}; leave --optim.optimizer out"
    )

  def make(abstract):
    params, adam = _read_adamw(source, abstract.params)
    codec = config.optim.moment_codec()
    params, low = weights.store(config.params, params)
    like = jax.eval_shape(scale_by_coat_adam(codec=codec).init, adam.mu)
    encoded = from_plain_state(adam, like, seed=config.seed)
    return TrainState(
      step=adam.count,
      params=params,
      optimizer=weights.with_low(encoded, low),
      exact=adam if config.report_state else (),
      clip=steps.initial_clip(config, abstract),
    )

  return create_run("import", config, make)


def _read_adamw(
  source: Path, params: Any
) -> tuple[Any, optax.ScaleByAdamState]:
  """Reads Adam's state and f32 parameters; checks shapes against `params`."""
  checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
  path, to_host = source.absolute(), ocp.RestoreArgs(restore_type=np.ndarray)
  try:
    tree = checkpointer.metadata(path).item_metadata.tree
    how = jax.tree.map(lambda _: to_host, tree)
    tree = checkpointer.restore(path, args=ocp.args.PyTreeRestore(None, how))
  except Exception as error:  # Orbax and TensorStore raise many types.
    raise ValueError(
      f"import: could not read {source} as an Orbax checkpoint "
      f"({type(error).__name__}); pass a folder that Orbax's "
      "StandardCheckpointer wrote"
    ) from error

  def is_adam(node: Any) -> bool:
    return isinstance(node, dict) and {"count", "mu", "nu"} <= node.keys()

  nodes = jax.tree.leaves(tree, is_leaf=is_adam)
  states = [node for node in nodes if is_adam(node)]
  if len(states) != 1 or "params" not in tree:
    raise ValueError(
      f"import: expected params and one state of Adam in {source}, got "
      f"{', '.join(tree)} with {len(states)} states of Adam; save "
      "{'params': params, 'opt_state': opt_state}, with the opt_state of "
      "optax.adamw"
    )
  (state,) = states
  found = {"params": tree["params"], "mu": state["mu"], "nu": state["nu"]}
  want = _shapes(params)
  for name, part in found.items():
    others = [str(x) for x in sorted(want.items() ^ _shapes(part).items())]
    if others:
      raise ValueError(
        f"import: {name} of the checkpoint and of the run's model differ in "
        f"{', '.join(others[:2])} ({len(others)} in all); pass the preset and "
        "the options of the checkpoint's model"
      )
  found = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), found)
  count = jnp.int32(state["count"])
  adam = optax.ScaleByAdamState(count, found["mu"], found["nu"])
  return found["params"], adam


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  return {path: leaf.shape for path, leaf in leaf_paths(tree)}
