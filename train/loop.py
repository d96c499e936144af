# SPDX-License-Identifier: Apache-2.0
"""The training loop, which all commands share.

`run_command` claims the run's folder and has the runs of a command trained;
`train` is one run, from data to checkpoints, and reads from top to bottom. What
differs between commands is their configuration, and what they learn from
(`train.run.data`).
"""

import contextlib
import itertools
import math
import time
from collections.abc import Callable

import jax

from train import attention, convert, pretrained, step
from train.command_line import plain_errors
from train.config import TrainConfig
from train.mesh import batch_sharding, make_mesh
from train.objective import trained
from train.run import compare, processes, report
from train.run.checkpoint import Checkpoints, read_description
from train.run.data import RunData
from train.run.description import check_same, describe
from train.run.directory import RunDirectory
from train.run.exits import (
  Stop,
  is_received,
  say,
  stop_on_bad_input,
  stop_on_failure,
)
from train.run.metrics import MetricsLog, Progress
from train.run.profile import Profiler
from train.run.save_error import save_errors
from train.run.signals import Signals
from train.run.steps import StepsInFlight
from train.run.trackers import check_installed, open_trackers
from train.watch import Watcher


def run_command[Config: TrainConfig](
  read: Callable[[], Config],
  load: Callable[[Config], tuple[Config, RunData[Config]]],
) -> int:
  """Trains what a command line asks for, and its twins.

  Args:
    read: Reads the command line.
    load: Reads the data, and returns them with the run's configuration, of
      which they may say how many steps it has.

  Returns:
    The exit status.
  """
  with Signals() as signals:
    processes.reserve_gpu_memory()
    with plain_errors():
      config = read()
    try:
      if config.distributed:
        with stop_on_bad_input():
          processes.join()
      with stop_on_bad_input():
        config = pretrained.with_shape(config)
      with contextlib.ExitStack() as claimed:
        with stop_on_bad_input():
          check_installed(config)
          claimed.enter_context(RunDirectory(config.out).claimed(config))
        with stop_on_bad_input():  # Where the others wait for the claim.
          say(f"{config.out}: reading data")
          config, data = load(config)
          runs = [config, *compare.twins(config)]
        for each in runs:
          with stop_on_failure(), contextlib.ExitStack() as opened:
            with stop_on_failure():  # Before files close, which waits too.
              train(each, data, signals, opened)
        if processes.is_primary():
          compare.finish(runs)
    except Stop as stop:
      say(str(stop), process=stop.process)
      return stop.status
    except OSError as error:  # The disk is full, say.
      say(f"error: {error}", process=jax.process_index())
      return 1
  return 0


def train[Config: TrainConfig](
  config: Config,
  data: RunData[Config],
  signals: Signals,
  opened: contextlib.ExitStack,
) -> None:
  """Trains one run until its last step.

  Args:
    config: The run.
    data: What it learns from.
    signals: Entered already.
    opened: Closes the run's files when it is left, however training ends.

  Raises:
    Stop: training ends earlier.
  """
  signals.is_deferred = False
  if is_received(signals):  # At the end of the run before this one.
    raise Stop(
      signals.exit_status, f"{config.out}: not started; pass --resume to do so"
    )
  run = RunDirectory(config.out)

  # Devices: the mesh, and which sequences of a batch this process reads.
  with stop_on_bad_input():
    mesh = make_mesh(config.mesh_sizes)
    sharding = batch_sharding(mesh) if mesh else None
    own_rows = processes.own_rows(sharding, config.batch)

  # Data: an iterator whose place is saved, and a fixed held-out set.
  with stop_on_bad_input():
    description = describe(config, data)
    batches = data.train_batches(config, **own_rows)
    held_out = data.eval_batches(config, **own_rows)

  # Model and optimizer; their state first as shapes only.
  graph = step.build_graph(config)
  optimizer = step.build_optimizer(config, mesh)
  with stop_on_bad_input():
    abstract = step.abstract_state(config, optimizer, mesh)
    if not config.resume:
      pretrained.check(config, abstract)
  has_segments = "segments" in data.dtypes
  say(report.describe_sizes(config, abstract.params))
  for said in (
    *pretrained.describe_length(config),
    *attention.describe_fp8(config, has_segments=has_segments, mesh=mesh),
  ):
    say(said)

  # State: from the newest checkpoint, or drawn from the seed.
  done = 0
  if config.resume:
    with stop_on_bad_input():
      done, damaged = run.newest_whole_step()
      saved = read_description(run.checkpoints, done)
      where = run.checkpoints / str(done)
      changes = check_same(where, saved, config, data)
    if done >= config.steps:
      say(f"{config.out}: its {config.steps} steps are done already")
      return
    checkpoints = opened.enter_context(
      contextlib.closing(Checkpoints(run.checkpoints, keep=config.keep))
    )
    with stop_on_bad_input():
      state = convert.restore(checkpoints, done, config, abstract, batches)
    checkpoints.set_aside(after=done)
    if processes.is_primary():
      run.write_description(description)
    say(f"{config.out}: resumed at step {done}", *damaged, *changes)
  else:
    with stop_on_bad_input():
      if processes.is_primary():
        opened.callback(run.put_back)  # Unless the new run has a step.
        run.create(description)
        with save_errors(run.path):
          pretrained.keep_files(config, run)
          data.keep_files(run)
    checkpoints = opened.enter_context(
      contextlib.closing(Checkpoints(run.checkpoints, keep=config.keep))
    )
    with stop_on_bad_input():
      state = pretrained.initial_state(config, optimizer, mesh)
  is_silent = not processes.is_primary()
  with stop_on_bad_input():
    trackers = []
    if not is_silent:
      with save_errors(run.path):
        trackers = open_trackers(
          config, run.path, description, resumed_step=done
        )
  log = MetricsLog(
    run.metrics, resumed_step=done, is_silent=is_silent, trackers=trackers
  )
  opened.enter_context(contextlib.closing(log))
  profiler = Profiler(config.profile, run.path / "profile", is_silent=is_silent)
  opened.enter_context(contextlib.closing(profiler))

  # Both programs are compiled here, so that the loop only runs them.
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
  step_bytes = train_step.memory_analysis().peak_memory_in_bytes
  watcher = None
  if config.watch:
    watcher = Watcher(config, graph, mesh, abstract, batch)
  say(f"{config.out}: compiled in {time.monotonic() - started:.0f} s")

  samples = data.open_samples(config, graph, mesh, resumed_step=done)
  if samples is not None:
    opened.enter_context(contextlib.closing(samples))

  def on_devices(rows):
    return {
      name: processes.to_devices(x, sharding, config.batch)
      for name, x in rows.items()
    }

  def evaluate(max_batches: int | None = None) -> dict[str, float]:
    inputs, found = itertools.islice(held_out, max_batches), []
    while True:
      with stop_on_bad_input():  # Images are read when a batch is.
        rows = next(inputs, None)
      if rows is None:
        return report.held_out_means(found)
      found.append(eval_step(state.params, on_devices(rows)))

  def not_finite(text: str) -> Stop:
    checkpoints.wait()
    last = checkpoints.latest_step()
    kept = "no checkpoint was saved before; lower --optim.lr and start again"
    if last is not None:
      kept = f"the last good checkpoint is {run.checkpoints / str(last)}"
    return Stop(1, f"{config.out}: {text}; {kept}")

  # The loop. While the devices work on a step, the host reads the one before.
  progress = Progress(
    config.out, steps=config.steps, done=done, is_silent=is_silent
  )
  opened.enter_context(contextlib.closing(progress))
  in_flight = StepsInFlight(
    log,
    progress,
    tokens_a_step=config.batch * config.seq,
    leaf_names=step.leaf_names(trained(config, abstract.params)),
  )

  def read_steps(leave: int = 0) -> None:
    if fault := in_flight.read(leave=leave):
      raise not_finite(fault)

  signals.is_deferred = True
  is_stopping = False
  first = done + 1
  while done < config.steps and not is_stopping:
    # One step. It is read at once where its state is used now.
    if profiler.is_at_edge:
      read_steps()
    profiler.before_step()
    started = time.monotonic()
    with stop_on_bad_input():
      rows = next(batches)
    rows = on_devices(rows)
    state, metrics = train_step(state, rows)
    done += 1
    in_flight.add(done, started, metrics)
    is_last = done == config.steps
    is_evaluated = done % config.eval_every == 0 or is_last
    is_watched = watcher is not None and watcher.is_due(done)
    is_read = is_evaluated or is_watched or done == first
    read_steps(leave=0 if is_read else 1)
    if done == 1 and processes.is_primary():
      run.remove_replaced()

    # Look at what tells early that low precision is about to hurt.
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

    # Save, but only a state whose loss is finite.
    is_stopping = is_received(signals)
    if done % config.save_every == 0 or is_last or is_stopping:
      read_steps()
      measured = measured or evaluate(max_batches=1)
      if not math.isfinite(loss := measured["held_out_loss"]):
        raise not_finite(
          f"after step {done} the held-out loss is {loss}, so that step is not "
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
