# SPDX-License-Identifier: Apache-2.0
"""Computes the errors of 8-bit formats and codecs on given tensors."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from coat_jax import recipes
from coat_jax.codecs.fp8 import ExpandedFP8, ScaledFP8
from coat_jax.codecs.group import GroupCodec
from coat_jax.codecs.integers import LinearInt8
from coat_jax.models.config import ModelConfig
from coat_jax.models.layer import TransformerLayer
from coat_jax.numerics.formats import E4M3, E5M2, INT8
from coat_jax.numerics.qtensor import quantize
from coat_jax.recipes import CoatRecipe
from studies.layer_tensors import LayerTensors
from studies.trained_moments import EPS, Moments

FORMATS = {"E4M3": E4M3, "E5M2": E5M2, "INT8": INT8}
# Which values share a scale: all values of a tensor, all values of a 128 x 128
# tile of a weight, or, for an int, this many adjacent values of a row.
Shared = Literal["tensor", "tile"] | int
GROUPS: tuple[Shared, ...] = ("tensor", 128, 64, 32, 16)
TILE = 128
RECIPES: dict[str, CoatRecipe] = {
  "bf16": recipes.bf16(),
  "fp8_linear": recipes.fp8_linear(),
  "coat": recipes.coat(),
  "coat, FP8 attention": recipes.coat(attention="fp8"),
  "fp8_block": recipes.fp8_block(),
  "int8": recipes.int8(),
  "int8, INT8 attention": recipes.int8(attention="fp8"),
}


def orders(group_size: int) -> dict[str, tuple[GroupCodec, GroupCodec]]:
  """Maps names to pairs of codecs for m and v; all of them round to nearest."""
  nearest = group_size, "nearest"
  found: dict[str, tuple[GroupCodec, GroupCodec]] = {}
  for name in ("E4M3", "E5M2"):
    plain = ScaledFP8(*nearest, FORMATS[name])
    expanded = ExpandedFP8(*nearest, FORMATS[name])
    found |= {name: (plain, plain), f"{name} + expansion": (expanded, expanded)}
  integers = (LinearInt8(*nearest, signed=x) for x in (True, False))
  return found | {"INT8": tuple(integers)}  # pyright: ignore[reportReturnType]


@functools.partial(jax.jit, static_argnums=0)
def through(codec: GroupCodec, x: jax.Array) -> jax.Array:
  """Encodes and decodes a moment; the codec must round to nearest."""
  return codec.decode(codec.encode(x, None))


def moment_errors(exact: Moments, stored: Moments) -> dict[str, float]:
  """Computes errors of moments that were encoded and decoded.

  Returns:
    mu_error, nu_error: RMS of the error divided by the RMS of the moment.
    zeroed_mu, zeroed_nu: fraction of the nonzero values that became zero.
    update_mse: mean square error of the update m / (sqrt(v) + eps), which the
      COAT paper reports.
    update_error: RMS error of the update / RMS of the exact update.
    kept_error: `update_error` over values whose v did not become zero.
  """
  mu, nu = (np.asarray(x, np.float64) for x in exact)
  mu_s, nu_s = (np.asarray(x, np.float64) for x in stored)
  update, update_s = mu / (np.sqrt(nu) + EPS), mu_s / (np.sqrt(nu_s) + EPS)
  kept = (nu_s > 0) | (nu == 0)
  return {
    "mu_error": relative_error(mu, mu_s),
    "nu_error": relative_error(nu, nu_s),
    "zeroed_mu": zeroed(mu, mu_s),
    "zeroed_nu": zeroed(nu, nu_s),
    "update_mse": float(np.mean((update - update_s) ** 2)),
    "update_error": relative_error(update, update_s),
    "kept_error": relative_error(update[kept], update_s[kept]),
  }


def relative_error(exact: np.ndarray, found: np.ndarray) -> float:
  """Computes the RMS of the error divided by the RMS of the exact values."""
  exact, found = np.asarray(exact, np.float64), np.asarray(found, np.float64)
  total = np.sum(exact**2)
  return float(np.sqrt(np.sum((found - exact) ** 2) / total)) if total else 0.0


def zeroed(exact: np.ndarray, found: np.ndarray) -> float:
  """Computes the fraction of the nonzero values that became zero."""
  nonzero = np.asarray(exact) != 0
  return float(np.mean(np.asarray(found)[nonzero] == 0))


def rounded(x: np.ndarray, name: str, shared: Shared) -> np.ndarray:
  """Quantizes a tensor [..., n] to a format of `FORMATS` and dequantizes it.

  Scales of tensors and tiles are f32, and scales of groups are BF16.
  """
  if shared != "tile":
    return np.asarray(_rounded(jnp.asarray(x), name, shared))
  # Reshape so that each tile is a row. Incomplete tiles are padded with zeros.
  m, n = x.shape
  rows, columns = -(-m // TILE), -(-n // TILE)
  tiles = np.pad(x, ((0, rows * TILE - m), (0, columns * TILE - n)))
  tiles = tiles.reshape(rows, TILE, columns, TILE).transpose(0, 2, 1, 3)
  tiles = tiles.reshape(rows * columns, TILE**2)
  found = np.asarray(_rounded(jnp.asarray(tiles), name, "tile"))
  found = found.reshape(rows, columns, TILE, TILE).transpose(0, 2, 1, 3)
  return found.reshape(rows * TILE, columns * TILE)[:m, :n]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _rounded(x, name, shared):
  group_size = {"tensor": None, "tile": TILE**2}.get(shared, shared)
  of_groups = isinstance(shared, int)
  scale_dtype = jnp.bfloat16 if of_groups else jnp.float32
  codes = quantize(
    x, group_size=group_size, dtype=FORMATS[name], scale_dtype=scale_dtype
  )
  return codes.dequantize()


def tensor_errors(
  layers: Sequence[np.ndarray], name: str, shared: Shared
) -> dict[str, Any]:
  """Computes the error of a format on one tensor of each layer.

  `by_layer` contains the relative RMS error in each layer, and `error` is the
  root mean square of these errors. `zeroed` is the fraction of nonzero values
  that became zero.
  """
  found = [rounded(x, name, shared) for x in layers]
  errors = [relative_error(x, y) for x, y in zip(layers, found, strict=True)]
  lost = [zeroed(x, y) for x, y in zip(layers, found, strict=True)]
  return {
    "error": float(np.sqrt(np.mean(np.square(errors)))),
    "zeroed": float(np.mean(lost)),
    "by_layer": [float(f"{x:.4g}") for x in errors],
  }


def spread(layers: Sequence[np.ndarray]) -> dict[str, float]:
  """Computes amax / RMS and kurtosis of each layer; returns their medians.

  The kurtosis of a normal distribution is 3.
  """
  found = []
  for x in layers:
    square = np.asarray(x, np.float64) ** 2
    mean = np.mean(square)
    found.append((np.sqrt(square.max() / mean), np.mean(square**2) / mean**2))
  amax, kurtosis = np.median(found, axis=0)
  return {"amax_over_rms": float(amax), "kurtosis": float(kurtosis)}


# Maps names in the rows to names in `LayerTensors`.
ACTIVATIONS = {
  "input of the attention's norm": "attention's norm",
  "input of the MLP's norm": "MLP's norm",
  "norm's output, into q, k, v": "into q, k, v",
  "norm's output, into gate, up": "into gate, up",
  "q": "q",
  "k": "k",
  "v": "v",
  "attention's output": "into projection",
  "gate, up": "gate, up",
  "SiLU product, into down": "into down",
}
GRADIENTS = {
  f"gradient of {name}": name
  for name in ("q, k, v", "projection", "gate, up", "down")
}
_WEIGHTS = {
  "weight of q, k, v": ("attention", "qkv", "linear"),
  "weight of projection": ("attention", "out"),
  "weight of gate, up": ("mlp", "gate_up"),
  "weight of down": ("mlp", "down"),
}


def tensors(
  found: LayerTensors, params: Any
) -> Iterator[tuple[str, str, list[np.ndarray]]]:
  """Yields (kind, name, tensor of each layer) for all quantized tensors.

  Weights are transposed, so that matmuls sum over their last axis.
  """
  for name, key in ACTIVATIONS.items():
    yield "activation", name, list(np.asarray(found.values[key]))
  for name, key in GRADIENTS.items():
    yield "gradient", name, list(np.asarray(found.gradients[key]))
  for name, path in _WEIGHTS.items():
    x = params["layers"]
    for key in path:
      x = x[key]
    x = np.asarray(x["kernel"])
    x = x.reshape(*x.shape[:2], -1).transpose(0, 2, 1)
    yield "weight", name, list(x)


def layer_errors(
  config: ModelConfig, params: Any, found: LayerTensors, chosen: CoatRecipe
) -> dict[str, float]:
  """Compares layers that use the recipe `chosen` with the same layers in f32.

  Each layer gets the input and the output gradient that were captured for it,
  rounded to BF16. Outputs are compared without the residual stream. Errors are
  root mean squares over layers.
  """
  x = found.values["attention's norm"].astype(jnp.bfloat16)
  g = found.gradients["down"].astype(jnp.bfloat16)
  arrays = params["layers"], x, g
  exact = _run_layers(config, recipes.bf16(), jnp.float32, *arrays)
  got = _run_layers(config, chosen, jnp.bfloat16, *arrays)
  errors = []
  for i in range(len(x)):
    pairs = [
      [
        relative_error(a[i], b[i])
        for a, b in zip(*map(jax.tree.leaves, pair), strict=True)
      ]
      for pair in zip(exact, got, strict=True)
    ]
    (output,), (gradient,), weights = pairs
    rms = np.sqrt(np.mean(np.square(weights)))
    errors.append([output, gradient, rms, max(weights)])
  names = "output", "input_gradient", "weight_gradient", "worst_weight_gradient"
  means = np.sqrt(np.mean(np.square(errors), axis=0))
  return dict(zip(names, map(float, means), strict=True))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run_layers(config, chosen, dtype, params, x, g):
  """Computes, for each layer, the output minus x and all gradients."""
  graph = nnx.split(
    nnx.eval_shape(
      lambda: TransformerLayer(config, chosen, dtype=dtype, rngs=nnx.Rngs(0))
    ),
    nnx.Param,
  )[0]

  def run(own):
    weights, x, g = own
    x, g = x.astype(dtype), g.astype(dtype)
    y, back = jax.vjp(lambda p, x: nnx.merge(graph, p)(x), weights, x)
    dweights, dx = back(g)
    f32 = lambda x: x.astype(jnp.float32)  # noqa: E731
    # Subtract the residual stream, which is the same with all recipes.
    return f32(y) - f32(x), f32(dx) - f32(g), dweights

  return jax.lax.map(run, (params, x, g))
