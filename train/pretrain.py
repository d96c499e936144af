# SPDX-License-Identifier: Apache-2.0
"""Trains a language model from scratch.

  python -m train.pretrain PRESET [options]      PRESET --help shows the options
  python -m train.pretrain demo --compare bf16   what `make train` runs

`train` is the whole of it, from data to checkpoints, and reads from top to
bottom. Exit status: 0 when training finished; 1 when a loss or a gradient was
not finite, a file could not be written, or a device has too little memory; 2
when the input was at fault, and then nothing was changed; 130 and 143 after
SIGINT and SIGTERM, when the state was saved. Of several processes
(`--distributed`) all have the same, but where one could not write a file or had
no memory: JAX ends the others then.

Of a GPU's memory JAX may take 93.5 %, about the 80 GB that an H100 is sold
with, in place of its usual 75 %, unless XLA_CLIENT_MEM_FRACTION says otherwise.
"""

import contextlib
import inspect
import itertools
import math
import os
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from train import convert, step
from train.config import TrainConfig
from train.data.batches import eval_batches, train_iterator
from train.data.tokens import TokenSource, load_tokens
from train.mesh import batch_sharding, make_mesh
from train.presets import PRESETS
from train.run import compare, processes, report
from train.run.checkpoint import Checkpoints
from train.run.directory import RunDirectory, check_same, describe
from train.run.metrics import MetricsLog, Progress
from train.run.signals import Signals

# About what a GPU is sold with, of what it has: 80 of 85.5 GB, 141 of 150.8;
# the rest is for CUDA, cuBLAS and NCCL.
_GPU_SHARE = "0.935"


class Stop(Exception):
  """Ends the program with an exit status and, on standard error, a text.

  All processes of the run end so; `speaker` is the one that prints.
  """

  def __init__(self, status: int, text: str, speaker: int = 0):
    super().__init__(text)
    self.status, self.speaker = status, speaker


@contextlib.contextmanager
def blaming_input():
  """Errors in here are the input's: exit status 2 and a sentence.

  Of several processes all stop where one of them does.
  """
  fault = None
  try:
    yield
  except (ValueError, OSError) as error:
    fault = error
  faults = processes.gather(fault is not None)
  if any(faults):
    raise Stop(2, f"error: {fault}", speaker=faults.index(True)) from fault


@contextlib.contextmanager
def failing_alone():
  """A file that cannot be written, or too little memory, ends the run.

  It ends one of several processes at once: the others know nothing of it and
  wait for this process, and at a usual exit it would wait for them. Once it is
  gone JAX ends them too.
  """
  try:
    yield
  except (OSError, jax.errors.JaxRuntimeError) as error:
    text = f"error: {error}"
    if isinstance(error, jax.errors.JaxRuntimeError):
      if "RESOURCE_EXHAUSTED: Out of memory" not in text:
        raise
      text = (
        f"{text.splitlines()[0].rstrip('.')}; raise --accumulate, give --mesh "
        "more devices or start with a smaller --batch: python -m train.plan "
        "tells what fits"
      )
    stop = Stop(1, text, speaker=jax.process_index())
    if jax.process_count() == 1:
      raise stop from error
    say(text, speaker=stop.speaker)
    os._exit(1)


def train(
  config: TrainConfig,
  tokens: TokenSource,
  signals: Signals,
  opened: contextlib.ExitStack,
) -> None:
  """Trains until the last step.

  Args:
    config: The run.
    tokens: Its data.
    signals: Entered already.
    opened: Takes what is to be closed in the end, however that comes.

  Raises:
    Stop: it ends earlier.
  """
  signals.is_deferred = False
  if is_received(signals):  # At the end of the run before this one.
    raise Stop(signals.exit_status, f"{config.out}: not begun; --resume does")
  run = RunDirectory(config.out)
  description = describe(config, tokens.fingerprint())

  # The devices, and where on them a batch lies.
  with blaming_input():
    mesh = make_mesh(config.mesh_sizes)
    on_batch = batch_sharding(mesh) if mesh else None
    own_rows = processes.own_rows(on_batch, config.batch)

  # Data: an iterator whose place is saved, and a fixed held-out set.
  sizes = dict(seq_len=config.seq, batch_size=config.batch, **own_rows)
  with blaming_input():
    batches = train_iterator(tokens, **sizes, seed=config.seed)
    held_out = eval_batches(tokens, **sizes, max_batches=config.eval_batches)

  # Model and optimizer; their state first as shapes only.
  graph = step.build_graph(config)
  optimizer = step.build_optimizer(config, mesh)
  with blaming_input():
    abstract = step.abstract_state(config, optimizer, mesh)
  say(describe_sizes(config, abstract))

  # The state: from the last checkpoint, or drawn from the seed.
  done = 0
  if config.resume:
    with blaming_input():
      done, damaged = run.newest_whole_step()
      convert_state = config.convert_state
      changes = check_same(run, done, description, convert_state=convert_state)
    if done >= config.steps:
      say(f"{config.out}: its {config.steps} steps are done already")
      return
    checkpoints = opened.enter_context(
      contextlib.closing(Checkpoints(run.checkpoints, keep=config.keep))
    )
    with blaming_input():
      state = convert.restore(checkpoints, done, config, abstract, batches)
    checkpoints.set_aside(after=done)
    if processes.is_primary():
      run.write_description(description)
    say(f"{config.out}: resumed at step {done}", *damaged, *changes)
  else:
    with blaming_input():
      if processes.is_primary():
        run.create(description)
    checkpoints = opened.enter_context(
      contextlib.closing(Checkpoints(run.checkpoints, keep=config.keep))
    )
    state = step.initial_state(config, optimizer, mesh)
  is_silent = not processes.is_primary()
  log = MetricsLog(run.metrics, resumed_step=done, is_silent=is_silent)
  opened.enter_context(contextlib.closing(log))

  # Both programs are compiled here, so that the loop only runs them.
  say(f"{config.out}: compiling")
  shape = config.batch, config.seq + 1
  batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=on_batch)
  train_step = step.train_step(config, graph, optimizer, mesh)
  train_step = step.compile_on(mesh, train_step, abstract, batch, updates=True)
  eval_step = step.eval_step(graph, accumulate=config.accumulate)
  eval_step = step.compile_on(mesh, eval_step, abstract.params, batch)

  def evaluate(max_batches: int | None = None) -> float:
    with blaming_input():
      inputs = list(itertools.islice(held_out, max_batches))
    losses = [eval_step(state.params, on_devices(each)) for each in inputs]
    return float(np.mean([float(loss) for loss in losses]))

  def on_devices(rows):
    return processes.to_devices(rows["tokens"], on_batch, config.batch)

  def fail(text: str) -> Stop:
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
    started = time.monotonic()
    with blaming_input():
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
      names = step.leaf_names(abstract.params)
      bad = [
        n for n, ok in zip(names, metrics.is_finite, strict=True) if not ok
      ]
      raise fail(
        f"step {done} has loss {loss} and gradients that are not finite in "
        f"{', '.join(bad) or 'no leaf'}"
      )
    progress.step(done, loss, speed)

    # Evaluate, and report on the optimizer's state.
    is_last = done == config.steps
    held_out_loss = None
    if done % config.eval_every == 0 or is_last:
      held_out_loss = evaluate()
      log.write(step=done, held_out_loss=held_out_loss)
      progress.held_out(done, held_out_loss)
      if config.report_state:
        log.write(step=done, **report.report_state(config, state))

    # Save, but only a state that can go on: its loss is finite.
    is_stopping = is_received(signals)
    if done % config.save_every == 0 or is_last or is_stopping:
      if held_out_loss is None:
        held_out_loss = evaluate(max_batches=1)
      if not math.isfinite(held_out_loss):
        raise fail(
          f"after step {done} the held-out loss is {held_out_loss}, so that "
          "step is not saved"
        )
      checkpoints.save(done, state, batches, description)
  checkpoints.wait()
  signals.is_deferred = False
  if done < config.steps:
    raise Stop(
      signals.exit_status,
      f"{config.out}: saved step {done} of {config.steps}; --resume goes on",
    )


def describe_sizes(config: TrainConfig, abstract: step.TrainState) -> str:
  """A line with what the options amount to."""
  count = sum(leaf.size for leaf in jax.tree.leaves(abstract.params))
  tokens = config.batch * config.seq
  state = report.state_bytes_per_param(config)
  return (
    f"{config.out}: {count / 1e6:,.2f} M parameters, {state:.2f} bytes each in "
    f"the optimizer; {tokens:,} tokens a step, {tokens * config.steps:,} in all"
  )


def is_received(signals: Signals) -> bool:
  """Whether one of the processes was sent a signal; all then know of it."""
  received = max(processes.gather(signals.received or 0))
  if received:  # Else one may have come since: it counts the next time.
    signals.received = received
  return bool(received)


def take_most_of_gpus() -> None:
  """Lets JAX take as much of a GPU as `train.plan` counts on.

  To be called before JAX looks for devices.
  """
  names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
  if not any(name in os.environ for name in names):
    os.environ[names[0]] = _GPU_SHARE


def say(*lines: str, speaker: int = 0) -> None:
  """Prints to standard error, at once, by one of the processes."""
  if jax.process_index() == speaker:
    print(*lines, sep="\n  ", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
  """Reads the command line, trains, and returns the exit status."""
  presets = {
    name: (inspect.getdoc(preset), preset()) for name, preset in PRESETS.items()
  }
  take_most_of_gpus()
  with Signals() as signals:
    config = tyro.extras.overridable_config_cli(
      presets,
      args=arguments,
      prog="python -m train.pretrain",
      description="Trains a language model; each preset's --help has options.",
      config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
      if config.distributed:
        with blaming_input():
          processes.join()
      with contextlib.ExitStack() as claimed:
        with blaming_input():
          claimed.enter_context(RunDirectory(config.out).claimed(config))
          say(f"{config.out}: reading data")
          tokens = load_tokens(config.data, config.model.vocab_size)
          runs = [config, *compare.twins(config)]
        for each in runs:
          with failing_alone(), contextlib.ExitStack() as opened:
            with failing_alone():  # Before it closes, which waits too.
              train(each, tokens, signals, opened)
        if processes.is_primary():
          compare.finish(runs)
    except Stop as stop:
      say(str(stop), speaker=stop.speaker)
      return stop.status
    except OSError as error:  # The disk is full, say.
      say(f"error: {error}", speaker=jax.process_index())
      return 1
  return 0


if __name__ == "__main__":
  sys.exit(main())
