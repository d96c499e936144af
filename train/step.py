# SPDX-License-Identifier: Apache-2.0
"""One training step and one evaluation, as pure functions.

The state is a tuple of plain trees, which a checkpoint stores unchanged. A step
is compiled once, ahead of time, and donates its state: the new state reuses the
buffers of the old one, so you can pass each state only once.

Several functions share three arguments: `graph` comes from `build_graph`,
`optimizer` from `build_optimizer`, and `mesh` from `train.mesh.make_mesh` (None
for one device).
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from coat_jax import coat_muon
from coat_jax.models import model_matrices
from coat_jax.models.params import param_shardings, parameter
from coat_jax.optimizer import (
  FusedTransformation,
  fused_coat_adamw,
  fused_coat_lion,
  sharding,
)
from coat_jax.optimizer.clipping import ClipState
from coat_jax.optimizer.masks import leaf_paths
from coat_jax.optimizer.state import FusedState
from train import weights
from train.config import TrainConfig
from train.objective import AnyBatch, Rows, objective_of, trained
from train.optimizers import learning_rate, of_transformation
from train.update import (
  exact_adam,
  microbatches,
  update,
  update_in_backward,
  with_cache,
)

# This RMS makes Muon's updates as large as AdamW's, so that both can use one
# learning rate: arXiv:2502.16982, section 2.2.
_CONSISTENT_RMS = 0.2


class TrainState(NamedTuple):
  """Everything that a step updates, except the position in the data."""

  step: jax.Array  # int32, steps done.
  # Nested dicts of the weights that layers compute with.
  params: Any
  # The moments of the trained parts (`train.objective.trained`), and the number
  # of updates; with params bfloat16_low8 also the weights' low bytes.
  optimizer: FusedState
  # With report_state, f32 moments to compare the stored moments with; else ().
  exact: optax.ScaleByAdamState | tuple[()]
  # Gradient norms of earlier steps; () with clip global.
  clip: ClipState | tuple[()] = ()


class StepMetrics(NamedTuple):
  """Metrics of a step, computed with the parameters before its update."""

  loss: jax.Array  # f32, `Objective.loss` of the batch, in nats per target.
  grad_norm: jax.Array  # f32, global norm of the gradients before clipping.
  lr: jax.Array  # f32, learning rate of the update.
  is_finite: jax.Array  # bool [leaves], one per gradient in `leaf_names` order.
  # int32, the number of targets in the loss; None if all positions are targets.
  targets: jax.Array | None = None
  # f32, the share of the input that is padding; None if rows have no padding.
  padding: jax.Array | None = None


class Evaluation(NamedTuple):
  """Metrics of a held-out batch."""

  loss: jax.Array  # f32, mean loss of the batch's targets, in nats.
  targets: jax.Array | None  # As in `StepMetrics`.
  # f32, the share of correct predictions, if the objective measures it.
  accuracy: jax.Array | None = None


def decays(params) -> Any:
  """Builds the weight decay mask: false for norms, biases and embeddings."""
  others = ("norm", "bias", "embedding", "positions")
  decayed = [parameter(x).role not in others for x in leaf_names(params)]
  return jax.tree.unflatten(jax.tree.structure(params), decayed)


def build_optimizer(
  config: TrainConfig,
  mesh: Mesh | None = None,
  *,
  rate: optax.ScalarOrSchedule | None = None,
  seed: ArrayLike | None = None,
) -> FusedTransformation:
  """Builds the optimizer; on a mesh, each device updates its own shards.

  `rate` replaces the run's learning rate schedule, and `seed` its seed for
  stochastic rounding. Both may be traced.
  """
  optim, shardings = config.optim, None
  if mesh is not None:
    params = jax.eval_shape(lambda: _initial_params(config))
    shardings = param_shardings(mesh, trained(config, params))
  rate = learning_rate(config) if rate is None else rate
  seed = config.seed if seed is None else seed
  shared: dict[str, Any] = dict(
    codec=optim.moment_codec(),
    weight_decay=optim.weight_decay,
    seed=seed,
    shardings=shardings,
  )
  if optim.optimizer == "coat_muon":
    muon = coat_muon(
      rate,
      beta=optim.momentum,
      eps=optim.eps,
      weight_decay_mask=decays,
      adam_b1=optim.b1,
      adam_b2=optim.b2,
      adam_weight_decay=optim.weight_decay,
      adam_weight_decay_mask=decays,
      consistent_rms=_CONSISTENT_RMS,
      matrices=model_matrices(config.model),
      **shared,
    )
    return of_transformation(muon, seed=seed)
  shared |= dict(
    mask=decays,
    low_bits=config.params == "bfloat16_low8",
    implementation="xla" if config.implementation == "xla" else None,
  )
  if optim.optimizer == "coat_lion":
    return fused_coat_lion(rate, optim.b1, optim.b2, **shared)
  return fused_coat_adamw(rate, optim.b1, optim.b2, optim.eps, **shared)


def build_graph(config: TrainConfig) -> nnx.GraphDef:
  """Builds the model's graph definition, which contains no weights."""
  build = objective_of(config.model).build
  return nnx.split(nnx.eval_shape(lambda: build(config)), nnx.Param)[0]


def abstract_state(
  config: TrainConfig, optimizer: FusedTransformation, mesh: Mesh | None = None
) -> TrainState:
  """Builds the state's shapes, dtypes and, on a mesh, shardings."""
  params = jax.eval_shape(lambda: _initial_params(config))
  make = functools.partial(with_moments, config, optimizer)
  if mesh is None:
    return jax.eval_shape(make, params)
  return sharding.abstract_state(make, params, param_shardings(mesh, params))


def initial_state(
  config: TrainConfig, optimizer: FusedTransformation, mesh: Mesh | None = None
) -> TrainState:
  """Builds the state before the first step, with random weights.

  On a mesh, each device computes only its shards. The weights depend on the
  seed, but not on the mesh.
  """
  return initializer(config, optimizer, mesh)()


def initializer(
  config: TrainConfig, optimizer: FusedTransformation, mesh: Mesh | None = None
) -> jax.stages.Wrapped:
  """Builds the jitted function that returns the state before the first step."""
  out_shardings = shardings(abstract_state(config, optimizer, mesh))

  @functools.partial(jax.jit, out_shardings=out_shardings)
  def make():
    return weights.draw(
      config.params,
      functools.partial(_initial_params, config),
      functools.partial(with_moments, config, optimizer),
    )

  return make


def initial_clip(config: TrainConfig, abstract: TrainState) -> Any:
  """Builds the clipping state before the first step."""
  make = jax.jit(
    lambda: _no_norms(config, trained(config, abstract.params)),
    out_shardings=shardings(abstract.clip),
  )
  return make()


def _no_norms(config: TrainConfig, params: Any) -> ClipState | tuple[()]:
  clip = config.optim.clipping()
  if clip is None:
    return ()
  return clip.init(params, stack=objective_of(config.model).stacks)


def shardings(abstract: Any) -> Any:
  """Returns a tree's shardings for `jit`; None if no leaf has one."""
  found = jax.tree.map(lambda x: x.sharding, abstract)
  return found if jax.tree.leaves(found) else None


def _initial_params(config: TrainConfig, store: Callable | None = None) -> Any:
  model = objective_of(config.model).build(config, store)
  return nnx.to_pure_dict(nnx.split(model, nnx.Param)[1])


def with_moments(
  config: TrainConfig, optimizer: FusedTransformation, params: Any
) -> TrainState:
  """Builds the state before the first step from the weights `params`."""
  stored, _ = weights.store(config.params, params)
  params = trained(config, params)
  exact, norms = (), _no_norms(config, params)
  if config.report_state:
    exact = exact_adam(config).init(weights.in_f32(params))
  return TrainState(jnp.int32(0), stored, optimizer.init(params), exact, norms)


def train_step(
  config: TrainConfig,
  graph: nnx.GraphDef,
  optimizer: FusedTransformation,
  mesh: Mesh | None = None,
) -> Callable[[TrainState, Rows], tuple[TrainState, StepMetrics]]:
  """Builds the training step, a function of (state, rows).

  `Objective.batch_of` turns the rows, such as tokens int32 [B, T + 1], into a
  batch. On a mesh, trace the step under `jax.set_mesh`, as `compile_on` does.
  """
  schedule = learning_rate(config)
  change = update_in_backward if config.optimizer_in_backward else update
  objective = objective_of(config.model)

  def step(state, rows):
    batch: Any = objective.batch_of(rows)
    done, exact = change(config, graph, optimizer, mesh, state, batch)
    metrics = StepMetrics(
      loss=done.loss,
      grad_norm=done.grad_norm,
      lr=jnp.asarray(schedule(state.step), jnp.float32),
      is_finite=done.is_finite,
      targets=_count_targets(batch),
      padding=objective.padding(batch),
    )
    state = TrainState(
      state.step + 1, done.params, done.state, exact, done.clip_state
    )
    return state, metrics

  return step


def eval_step(
  graph: nnx.GraphDef, *, accumulate: int = 1
) -> Callable[[Any, Rows], Evaluation]:
  """Builds a function of (params, rows) that evaluates in microbatches."""

  def evaluate(params, rows):
    model = nnx.merge(graph, params)
    objective = objective_of(model.config)
    batch = objective.batch_of(rows)
    model.eval()
    graph_of_eval, cache = with_cache(model)

    def measure(batch):
      return objective.measure(nnx.merge(graph_of_eval, params, cache), batch)

    if accumulate == 1:
      found = measure(batch)
    else:
      found = jax.lax.map(measure, microbatches(batch, accumulate))
      mean = jnp.mean if batch.shares is None else jnp.sum
      found = {name: mean(values) for name, values in found.items()}
    return Evaluation(**found, targets=_count_targets(batch))

  return evaluate


def _count_targets(batch: AnyBatch) -> jax.Array | None:
  return None if batch.shares is None else jnp.sum(batch.shares > 0)


def compile_on(
  mesh: Mesh | None, step: Callable, *abstract, updates: bool = False
) -> jax.stages.Compiled:
  """Compiles a step ahead of time, for abstract arguments.

  If `updates` is true, the first argument is a state, which is donated, and the
  first result is the new state, with the same shardings. All other results are
  replicated.
  """
  out_shardings = None
  context = contextlib.nullcontext()
  if mesh is not None:
    out_shardings = replicated = NamedSharding(mesh, PartitionSpec())
    if updates:
      out_shardings = shardings(abstract[0]), replicated
    context = jax.set_mesh(mesh)
  donated = 0 if updates else ()
  jitted = jax.jit(step, donate_argnums=donated, out_shardings=out_shardings)
  with context:
    return jitted.lower(*abstract).compile()


def leaf_names(tree) -> list[str]:
  """Returns the leaves' names, such as `layers/mlp/gate`, in tree order."""
  return [path for path, _ in leaf_paths(tree)]
