# SPDX-License-Identifier: Apache-2.0
"""The training loop, which pretrain, finetune and vit share.

If a run has several processes, all of them write checkpoints, but only the
first one writes other files. At the end of each `with stop_on_bad_input()`
block, the processes wait for each other, and all of them stop if one has
failed.
"""

import contextlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence

import jax

from train import pretrained, step
from train.command_line import check_compare, plain_errors, quiet_if_unread
from train.config import TrainConfig
from train.mesh import batch_sharding, make_mesh
from train.objective import trained
from train.restore import restore
from train.run import compare, processes, report
from train.run.checkpoint import Checkpoints
from train.run.data import RunData
from train.run.description import check_same, describe
from train.run.directory import RunDirectory
from train.run.exits import (
  Stop,
  is_received,
  read_or_stop,
  say,
  stop_on_bad_input,
  stop_on_failure,
)
from train.run.metrics import MetricsLog, Progress, StepsInFlight
from train.run.profile import Profiler
from train.run.signals import Signals
from train.run.trackers import check_installed, open_trackers
from train.run.writing import save_errors
from train.watch import Watcher


def run_command[Config: TrainConfig](
  read: Callable[[Sequence[str]], Config],
  load: Callable[[Config], tuple[Config, RunData[Config]]],
  arguments: Sequence[str] | None,
) -> int:
  """Trains a run and its BF16 baselines; returns the command's exit status."""
  words = sys.argv[1:] if arguments is None else arguments
  with Signals() as signals:
    processes.reserve_gpu_memory()
    with plain_errors():
      config = read(words)
      check_compare(config, words)
    try:
      with contextlib.ExitStack() as claimed:
        with stop_on_bad_input():
          if config.distributed:
            processes.join()
          config = pretrained.with_shape(config)
          check_installed(config)
          claimed.enter_context(RunDirectory(config.out).claimed(config))
        with stop_on_bad_input():  # The folder is claimed by now.
          say(f"{config.out}: reading data")
          config, data = load(config)
          runs = [config, *compare.twins(config)]
        for each in runs:
          with stop_on_failure(), contextlib.ExitStack() as opened:
            # If training fails, exit here, because closing files may block.
            with stop_on_failure():
              train(each, data, signals, opened)
        if processes.is_primary():
          with quiet_if_unread():
            compare.finish(runs)
    except Stop as stop:
      say(str(stop), process=stop.process)
      return stop.status
    except OSError as error:  # For example, the disk is full.
      say(f"error: {error}", process=jax.process_index())
      return 1
  return 0


def train[Config: TrainConfig](
  config: Config,
  data: RunData[Config],
  signals: Signals,
  opened: contextlib.ExitStack,
) -> None:
  """Trains one run to its last step; adds the files it opens to `opened`."""
  signals.is_deferred = False
  if is_received(signals):  # A signal came while an earlier run was ending.
    raise Stop(
      signals.exit_status,
      f"{config.out}: not started; pass --resume to start it",
    )
  run = RunDirectory(config.out)

  with stop_on_bad_input():
    # Changed options may cause errors below, so check for changes first.
    done, changed = 0, []
    if config.resume:
      done, saved = run.newest_description()
      where = run.checkpoints / str(done)
      changed = check_same(where, saved, config, data)

    # The data: an iterator whose position is saved, and a fixed held-out set.
    mesh = make_mesh(config.mesh_sizes)
    sharding = batch_sharding(mesh) if mesh else None
    own_rows = processes.own_rows(sharding, config.batch)
    description = describe(config, data)
    batches = data.train_batches(config, **own_rows)
    held_out = data.eval_batches(config, **own_rows)

    # The model and the optimizer, and the shapes of the state.
    graph = step.build_graph(config)
    optimizer = step.build_optimizer(config, mesh)
    abstract = step.abstract_state(config, optimizer, mesh)
    if not config.resume:
      pretrained.check(config, abstract)
  say(report.describe_sizes(config, abstract.params))
  pretrained.warn_of_length(config)

  # The state: from a checkpoint, or the initial one.
  if config.resume:
    if done >= config.steps:
      say(
        f"{config.out}: all {config.steps} steps are already done; the newest "
        f"checkpoint is of step {done}"
      )
      if changed:
        say(
          f"{config.out}: these changes have no effect; pass a larger --steps "
          "to continue the run with them",
          *changed,
        )
      return
    with stop_on_bad_input():
      state = restore(run.checkpoints, done, config, abstract, batches)
    say(f"{config.out}: resumed at step {done}", *changed)
  else:
    with stop_on_bad_input():
      state = pretrained.initial_state(config, optimizer, mesh)

  # The programs. They are compiled here, so that the loop only runs them.
  say(f"{config.out}: compiling")
  started = time.monotonic()
  batch = {
    name: shape.update(sharding=sharding)
    for name, shape in data.batch_shapes(config).items()
  }
  train_step = step.train_step(config, graph, optimizer, mesh)
  train_step = step.compile_on(mesh, train_step, abstract, batch, updates=True)
  eval_step = step.eval_step(graph, accumulate=config.accumulate)
  eval_step = step.compile_on(mesh, eval_step, abstract.params, batch)
  step_bytes = report.step_bytes(train_step, abstract.exact)
  watcher = None
  if config.watch:
    watcher = Watcher(config, graph, mesh, abstract, batch)
  say(f"{config.out}: compiled in {time.monotonic() - started:.0f} s")

  # The folder. A new run replaces an old one only after all programs compiled.
  if not config.resume:
    with stop_on_bad_input():
      if processes.is_primary():
        run.create(description)
        with save_errors(run.path):
          pretrained.keep_files(config, run)
          data.keep_files(run)
  checkpoints = Checkpoints(run.checkpoints, keep=config.keep)
  opened.enter_context(contextlib.closing(checkpoints))
  if config.resume:
    checkpoints.set_aside(after=done)
    if processes.is_primary():
      run.write_description(description)

  # The files and helpers of the loop.
  with stop_on_bad_input():
    trackers = open_trackers(config, run.path, description, resumed_step=done)
    log = MetricsLog(run.metrics, resumed_step=done, trackers=trackers)
  opened.enter_context(contextlib.closing(log))
  samples = data.open_samples(config, graph, mesh, resumed_step=done)
  if samples is not None:
    opened.enter_context(contextlib.closing(samples))
  profiler = Profiler(config.profile, run.path / "profile")
  opened.enter_context(contextlib.closing(profiler))
  progress = Progress(config.out, steps=config.steps, done=done)
  opened.enter_context(contextlib.closing(progress))
  in_flight = StepsInFlight(
    log,
    progress,
    tokens_a_step=config.batch * config.seq,
    leaf_names=step.leaf_names(trained(config, abstract.params)),
  )

  def on_devices(rows):
    return {
      name: processes.to_devices(x, sharding, config.batch)
      for name, x in rows.items()
    }

  def evaluate(max_batches: int | None = None) -> dict[str, float]:
    rows_of_batches = read_or_stop(itertools.islice(held_out, max_batches))
    return report.held_out_means(
      [eval_step(state.params, on_devices(rows)) for rows in rows_of_batches]
    )

  def not_finite(text: str) -> Stop:
    checkpoints.wait()
    last = run.latest_step()
    kept = "there is no earlier checkpoint; lower --optim.lr and start again"
    if last is not None:
      kept = f"the last good checkpoint is {run.checkpoints / str(last)}"
    return Stop(1, f"{config.out}: {text}; {kept}")

  def read_steps(leave: int = 0) -> None:
    if fault := in_flight.read(leave=leave):
      raise not_finite(fault)

  # The loop. While a step runs, the host reads the previous step's metrics.
  signals.is_deferred = True
  is_stopping = False
  first = done + 1
  train_rows = read_or_stop(batches)
  while done < config.steps and not is_stopping:
    # Run a step. Wait for its metrics now if it is the first step, or if the
    # code below needs them.
    if profiler.is_at_edge:
      read_steps()
    profiler.before_step()
    started = time.monotonic()
    rows = on_devices(next(train_rows))
    state, metrics = train_step(state, rows)
    done += 1
    in_flight.add(done, started, metrics)
    is_last = done == config.steps
    is_evaluated = done % config.eval_every == 0 or is_last
    is_watched = watcher is not None and done % config.watch == 0
    is_read = is_evaluated or is_watched or done == first
    read_steps(leave=0 if is_read else 1)

    # Check for early signs that low precision will harm training.
    if is_watched:
      found, said = watcher.look(state, rows, float(metrics.grad_norm))
      log.write(step=done, watch=found)
      for line in said:
        progress.say(f"{config.out}: step {done}: {line}")

    # Evaluate, and report on the optimizer's state.
    measured = {}
    if is_evaluated:
      measured = evaluate()
      log.write(step=done, **measured, step_bytes=step_bytes)
      progress.held_out(done, **measured)
      if config.report_state:
        log.write(step=done, **report.report_state(config, state))
      if samples is not None:
        for line in samples.write(done, state.params):
          progress.say(line)

    # Save the state if its held-out loss is finite.
    is_stopping = is_received(signals)
    if done % config.save_every == 0 or is_last or is_stopping:
      read_steps()
      measured = measured or evaluate(max_batches=1)
      if not math.isfinite(loss := measured["held_out_loss"]):
        raise not_finite(
          f"after step {done} the held-out loss is {loss}, so this step is not "
          "saved"
        )
      checkpoints.save(done, state, batches, description)
  profiler.close()
  checkpoints.wait()
  signals.is_deferred = False
  if done < config.steps:
    raise Stop(
      signals.exit_status,
      f"{config.out}: saved step {done} of {config.steps}; pass --resume to "
      "continue",
    )
