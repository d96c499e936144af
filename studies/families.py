# SPDX-License-Identifier: Apache-2.0
"""Measures how FP8 changes outputs and gradients in each model family.

  python -m studies.families [FAMILY ...]

For each family, the study builds a model with two layers of width 256. Its
weights are random, and scaled so that activations neither grow nor shrink. The
study runs the model with the `coat` recipe and with the `bf16` recipe. Both
runs use f32 activations and read the same tokens. Vision towers read images of
64 patches instead of tokens. A row compares the two runs:

  logits_error     relative RMS error of the logits, or of a tower's output
  cosine           cosine between a weight's two gradients, for the worst weight
  gradient_error   sqrt(2 - 2 * cosine), the distance between the worst weight's
                   two gradients after each is divided by its norm
  bytes_per_token  bytes that a layer with the `coat` recipe saves for its
                   backward pass; `bf16_bytes_per_token` is the same with
                   `bf16`. Both numbers are counted with BF16 activations.
"""

import argparse
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.harness import emit
from coat_jax import recipes
from coat_jax.models import VISION_FAMILIES, VisionConfig, VisionTower
from coat_jax.models.batch import Batch
from coat_jax.models.config import FAMILIES, ModelConfig
from coat_jax.models.decoder import Decoder
from coat_jax.models.loss import loss_of_hidden
from coat_jax.recipes import CoatRecipe
from train.memory.count import residual_bytes

_SIZES: dict[str, Any] = dict(
  num_layers=2,
  d_model=256,
  d_ff=640,
  num_heads=4,
  num_kv_heads=2,
  vocab_size=512,
)
_GEMMA: dict[str, Any] = dict(tied_embeddings=True, window=24, full_every=2)
_OPTIONS: dict[str, dict[str, Any]] = {
  "olmo": dict(clip_qkv=8.0),
  "mistral": dict(window=24),
  "gemma2": _GEMMA | dict(attention_soft_cap=50.0, logits_soft_cap=30.0),
  "gemma3_text": _GEMMA | dict(window_rope_theta=1e4, rope_theta=1e6),
  "gpt2": dict(max_positions=128, num_kv_heads=4),
  "qwen3_moe": dict(num_experts=8, experts_per_token=2),
}
_TOWER: dict[str, Any] = dict(
  num_layers=2, d_model=256, d_ff=1024, num_heads=4, image_size=112
)
_TOKENS = np.random.default_rng(0).integers(0, 512, (4, 65), np.int32)


def tower_of(family: str) -> VisionConfig:
  """Returns the small vision tower of a family."""
  return VisionConfig(family=family, patch_size=14, **_TOWER)


def _config(family: str) -> ModelConfig | VisionConfig:
  return (tower_of if family in VISION_FAMILIES else config_of)(family)


class Difference(NamedTuple):
  """How the results of a recipe differ from those of bf16."""

  logits_error: float
  cosines: dict[str, float]  # Keys are paths of parameters.

  @property
  def worst(self) -> str:
    """The parameter whose gradient differs most."""
    return min(self.cosines, key=lambda name: self.cosines[name])

  @property
  def gradient_error(self) -> float:
    """The distance between the worst weight's two normalized gradients."""
    return (2 - 2 * self.cosines[self.worst]) ** 0.5


def config_of(family: str) -> ModelConfig:
  """Returns the small decoder of a family."""
  return ModelConfig(family=family, **_SIZES | _OPTIONS.get(family, {}))


def difference(
  family: str, recipe: CoatRecipe | None = None, *, seed: int = 0
) -> Difference:
  """Compares a recipe, by default coat, with bf16 on a family's small model."""
  config = _config(family)
  weights = _weights(config, seed)
  run = _run_tower if isinstance(config, VisionConfig) else _run
  logits, gradients = run(config, recipe or recipes.coat(), weights)
  want_logits, want = run(config, recipes.bf16(), weights)
  error = np.linalg.norm(logits - want_logits) / np.linalg.norm(want_logits)
  cosines = {}
  for path, g in jax.tree.leaves_with_path(gradients):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    h = np.float64(functools.reduce(lambda x, key: x[key.key], path, want))
    g, h = np.float64(g).ravel(), h.ravel()
    cosines[name] = float(g @ h / (np.linalg.norm(g) * np.linalg.norm(h)))
  return Difference(float(error), cosines)


def _model(config: Any, recipe: CoatRecipe) -> Any:
  """Creates an abstract model (shapes only) with f32 activations."""
  how: dict[str, Any] = dict(dtype=jnp.float32, recipe=recipe)
  kind = VisionTower if isinstance(config, VisionConfig) else Decoder
  return nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0), **how))


def _weights(config: Any, seed: int) -> Any:
  """Creates random parameters that neither amplify nor shrink activations."""
  model = _model(config, recipes.bf16())
  rng = np.random.default_rng(seed)
  is_tower = isinstance(config, VisionConfig)
  one = 0.0 if not is_tower and config.choices.scale_plus_one else 1.0

  def draw(path, x):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if name.endswith("scale"):
      return rng.normal(one, 0.1, x.shape).astype(np.float32)
    if name.endswith("bias"):
      return rng.normal(0, 0.1, x.shape).astype(np.float32)
    rows = x.shape[1] if name.startswith("layers/") else config.d_model
    if name in ("layers/mlp/gate_up", "layers/mlp/down"):
      rows = x.shape[2]  # The number of rows of one expert's matrix.
    if name == "embedding" and not config.tied_embeddings:
      rows = 1
    if is_tower and not name.startswith("layers/"):
      rows = x.shape[0] if name.endswith("kernel") else 1
    return rng.normal(0, rows**-0.5, x.shape).astype(np.float32)

  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  return jax.tree.map_with_path(draw, params)


def _run(config: Any, recipe: CoatRecipe, weights: Any):
  """Computes logits and gradients, in NumPy."""
  graph = nnx.split(_model(config, recipe), nnx.Param)[0]

  def loss(weights):
    model, batch = nnx.merge(graph, weights), Batch(jnp.asarray(_TOKENS))
    hidden = model(batch.inputs)
    return loss_of_hidden(model, hidden, batch), model.logits_of_hidden(hidden)

  return _with_gradients(loss, weights)


def _run_tower(config: Any, recipe: CoatRecipe, weights: Any):
  """Computes hidden states, and gradients for a random output gradient."""
  # The pool does not affect hidden states, so leave out its weights. CLIP's
  # pool has none.
  weights = {name: x for name, x in weights.items() if name != "pool"}
  config = dataclasses.replace(config, has_pool=config.choices.pool is None)
  graph = nnx.split(_model(config, recipe), nnx.Param)[0]
  rng = np.random.default_rng(1)
  images = rng.normal(size=(4, 3, 112, 112)).astype(np.float32)
  dy = rng.normal(size=(4, config.num_tokens, 256)).astype(np.float32)

  def loss(weights):
    tower = nnx.merge(graph, weights)
    hidden = tower.norm(tower.features(jnp.asarray(images)))
    return jnp.mean(hidden * dy), hidden

  return _with_gradients(loss, weights)


def _with_gradients(loss, weights: Any):
  """Returns a loss function's auxiliary output and its gradients."""
  # The function runs only once, so compile it without optimization.
  run = jax.jit(
    jax.grad(loss, has_aux=True),
    compiler_options={"xla_backend_optimization_level": 0},
  )
  gradients, logits = jax.tree.map(np.asarray, run(weights))
  return logits, gradients


def saved_bytes(family: str, recipe: CoatRecipe) -> float:
  """Counts the bytes per token that one layer saves for its backward pass."""
  return residual_bytes(_config(family), recipe, tokens=256)["total"]


def rows(families: Iterable[str]) -> Iterator[dict]:
  """Compares each family and prints its row."""
  for family in families:
    found = difference(family)
    yield emit(
      "families",
      dict(family=family),
      logits_error=found.logits_error,
      gradient_error=found.gradient_error,
      cosine=found.cosines[found.worst],
      gradient=found.worst,
      bytes_per_token=saved_bytes(family, recipes.coat()),
      bf16_bytes_per_token=saved_bytes(family, recipes.bf16()),
    )


def main(arguments: list[str] | None = None) -> None:
  """Reads the command line and prints the rows."""
  parser = argparse.ArgumentParser(
    prog="python -m studies.families", description=__doc__.splitlines()[0]
  )
  known = *FAMILIES, *VISION_FAMILIES
  parser.add_argument("families", nargs="*", choices=known, help="default: all")
  list(rows(parser.parse_args(arguments).families or known))


if __name__ == "__main__":
  main()
