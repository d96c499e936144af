# SPDX-License-Identifier: Apache-2.0
"""Trains a language model, from random weights or those of a checkpoint.

  python -m train.pretrain PRESET [options]      PRESET --help shows the options
  python -m train.pretrain demo --compare bf16   what `make train` runs

`main` reads the command line and claims the run's folder; `train` is the run
itself, from data to checkpoints, and reads from top to bottom. `train/__init__`
says which files a program of your own needs of all this.

Exit status: 0 when training finished; 1 when a loss or a gradient was not
finite, a file could not be written, or a device has too little memory; 2 when
the input was wrong, and then nothing was changed; 130 and 143 after SIGINT and
SIGTERM, when the state was saved. All processes of a run (`--distributed`) have
the same status, except where one could not write a file or had too little
memory: JAX ends the others then.

JAX may take 93.5 % of a GPU's memory, about the 80 GB that an H100 is sold
with, instead of its usual 75 %, unless XLA_CLIENT_MEM_FRACTION says otherwise.
"""

import contextlib
import inspect
import itertools
import math
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from train import convert, pretrained, step
from train.config import TrainConfig
from train.data.batches import eval_batches, train_iterator
from train.data.tokens import TokenSource, load_tokens
from train.mesh import batch_sharding, make_mesh
from train.presets import PRESETS
from train.run import compare, processes, report
from train.run.checkpoint import Checkpoints, read_description
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
from train.run.signals import Signals
from train.run.trackers import check_installed, open_trackers


def main(arguments: Sequence[str] | None = None) -> int:
  """Reads the command line, trains, and returns the exit status."""
  with Signals() as signals:
    presets = {
      name: (inspect.getdoc(preset), preset())
      for name, preset in PRESETS.items()
    }
    processes.reserve_gpu_memory()
    config = tyro.extras.overridable_config_cli(
      presets,
      args=arguments,
      prog="python -m train.pretrain",
      description="Trains a language model; each preset's --help has options.",
      config=(tyro.conf.FlagCreatePairsOff,),
    )
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
          tokens = load_tokens(config.data, config.model.vocab_size)
          runs = [config, *compare.twins(config)]
        for each in runs:
          with stop_on_failure(), contextlib.ExitStack() as opened:
            with stop_on_failure():  # Before files close, which waits too.
              train(each, tokens, signals, opened)
        if processes.is_primary():
          compare.finish(runs)
    except Stop as stop:
      say(str(stop), process=stop.process)
      return stop.status
    except OSError as error:  # The disk is full, say.
      say(f"error: {error}", process=jax.process_index())
      return 1
  return 0


def train(
  config: TrainConfig,
  tokens: TokenSource,
  signals: Signals,
  opened: contextlib.ExitStack,
) -> None:
  """Trains one run until its last step.

  Args:
    config: The run.
    tokens: Its data.
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
  sizes = dict(seq_len=config.seq, batch_size=config.batch, **own_rows)
  with stop_on_bad_input():
    description = describe(config, tokens)
    batches = train_iterator(tokens, **sizes, seed=config.seed)
    held_out = eval_batches(tokens, **sizes, max_batches=config.eval_batches)

  # Model and optimizer; their state first as shapes only.
  graph = step.build_graph(config)
  optimizer = step.build_optimizer(config, mesh)
  with stop_on_bad_input():
    abstract = step.abstract_state(config, optimizer, mesh)
    if not config.resume:
      pretrained.check(config, abstract)
  say(report.describe_sizes(config, abstract.params))

  # State: from the newest checkpoint, or drawn from the seed.
  done = 0
  if config.resume:
    with stop_on_bad_input():
      done, damaged = run.newest_whole_step()
      saved = read_description(run.checkpoints, done)
      where = run.checkpoints / str(done)
      changes = check_same(where, saved, config, tokens)
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
        pretrained.keep_files(config, run)
    checkpoints = opened.enter_context(
      contextlib.closing(Checkpoints(run.checkpoints, keep=config.keep))
    )
    with stop_on_bad_input():
      state = pretrained.initial_state(config, optimizer, mesh)
  is_silent = not processes.is_primary()
  with stop_on_bad_input():
    trackers = []
    if not is_silent:
      trackers = open_trackers(config, run.path, description, resumed_step=done)
  log = MetricsLog(
    run.metrics, resumed_step=done, is_silent=is_silent, trackers=trackers
  )
  opened.enter_context(contextlib.closing(log))
  profiler = Profiler(config.profile, run.path / "profile", is_silent=is_silent)
  opened.enter_context(contextlib.closing(profiler))

  # Both programs are compiled here, so that the loop only runs them.
  say(f"{config.out}: compiling")
  shape = config.batch, config.seq + 1
  batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
  train_step = step.train_step(config, graph, optimizer, mesh)
  train_step = step.compile_on(mesh, train_step, abstract, batch, updates=True)
  eval_step = step.eval_step(graph, accumulate=config.accumulate)
  eval_step = step.compile_on(mesh, eval_step, abstract.params, batch)
  step_bytes = train_step.memory_analysis().peak_memory_in_bytes

  def on_devices(rows):
    return processes.to_devices(rows["tokens"], sharding, config.batch)

  def evaluate(max_batches: int | None = None) -> float:
    with stop_on_bad_input():
      inputs = list(itertools.islice(held_out, max_batches))
    losses = [eval_step(state.params, on_devices(each)) for each in inputs]
    return float(np.mean([float(loss) for loss in losses]))

  def not_finite(text: str) -> Stop:
    checkpoints.wait()
    last = checkpoints.latest_step()
    kept = "no checkpoint was saved before; lower --optim.lr and start again"
    if last is not None:
      kept = f"the last good checkpoint is {run.checkpoints / str(last)}"
    return Stop(1, f"{config.out}: {text}; {kept}")

  # The loop.
  tokens_a_step = config.batch * config.seq
  progress = Progress(
    config.out, steps=config.steps, done=done, is_silent=is_silent
  )
  opened.enter_context(contextlib.closing(progress))
  signals.is_deferred = True
  is_stopping = False
  while done < config.steps and not is_stopping:
    # One step, and its line in the log.
    profiler.before_step()
    started = time.monotonic()
    with stop_on_bad_input():
      rows = next(batches)
    state, metrics = train_step(state, on_devices(rows))
    metrics = jax.device_get(metrics)
    done += 1
    speed = tokens_a_step / (time.monotonic() - started)
    loss = float(metrics.loss)
    log.write(
      step=done,
      loss=loss,
      grad_norm=float(metrics.grad_norm),
      lr=float(metrics.lr),
      tokens_per_s=round(speed, 1),
    )
    if not (math.isfinite(loss) and metrics.is_finite.all()):
      leaves = zip(
        step.leaf_names(abstract.params), metrics.is_finite, strict=True
      )
      bad = ", ".join(name for name, is_finite in leaves if not is_finite)
      raise not_finite(
        f"step {done} has loss {loss} and gradients that are not finite in "
        f"{bad or 'no leaf'}"
      )
    if done == 1 and processes.is_primary():
      run.remove_replaced()
    progress.step(done, loss, speed)

    # Evaluate, and report on the optimizer's state.
    is_last = done == config.steps
    held_out_loss = None
    if done % config.eval_every == 0 or is_last:
      held_out_loss = evaluate()
      log.write(step=done, held_out_loss=held_out_loss, step_bytes=step_bytes)
      progress.held_out(done, held_out_loss)
      if config.report_state:
        log.write(step=done, **report.report_state(config, state))

    # Save, but only a state whose loss is finite.
    is_stopping = is_received(signals)
    if done % config.save_every == 0 or is_last or is_stopping:
      if held_out_loss is None:
        held_out_loss = evaluate(max_batches=1)
      if not math.isfinite(held_out_loss):
        raise not_finite(
          f"after step {done} the held-out loss is {held_out_loss}, so that "
          "step is not saved"
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


if __name__ == "__main__":
  sys.exit(main())
