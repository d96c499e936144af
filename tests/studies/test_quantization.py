# SPDX-License-Identifier: Apache-2.0
"""Compares the study of quantization errors with NumPy."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.models.decoder import Decoder
from coat_jax.models.loss import loss_fn
from studies import quantization, quantization_error, quantization_tables
from studies.layer_tensors import capture
from studies.rows import read_rows
from studies.trained_moments import EPS, Moments
from tests import cases, oracles
from train.presets import PRESETS

RNG = np.random.default_rng(0)
DTYPES = {"E4M3": oracles.E4M3, "E5M2": oracles.E5M2}


def cast(y, name):
  """Rounds to a format with ml_dtypes or NumPy."""
  if name == "INT8":
    return np.clip(np.rint(y), -127, 127)
  dtype, qmax = DTYPES[name], oracles.QMAX[DTYPES[name]]
  return np.clip(y, -qmax, qmax).astype(dtype).astype(np.float32)


def rounded(x, name, group_size):
  """Quantizes and dequantizes [rows, n]; groups have rounded-up BF16 scales."""
  qmax = 127.0 if name == "INT8" else oracles.QMAX[DTYPES[name]]
  groups = x.reshape(-1, group_size)
  scale = np.max(np.abs(groups), -1, keepdims=True) * np.float32(1 / qmax)
  if group_size < x.size:
    scale = oracles.bfloat16_at_least(scale).astype(np.float32)
  return (cast(groups / scale, name) * scale).reshape(x.shape)


def test_errors_of_tensors_match_numpy():
  x = RNG.standard_t(3, (8, 64)).astype(np.float32)
  pairs: list[tuple[str, quantization_error.Shared]]
  pairs = [("E4M3", "tensor"), ("E5M2", 16), ("INT8", 16)]
  for name, shared in pairs:
    group_size = 16 if shared == 16 else x.size
    want = rounded(x, name, group_size)
    got = quantization_error.tensor_errors([x], name, shared)
    relative = np.linalg.norm(want - x) / np.linalg.norm(x)
    assert got["error"] == pytest.approx(relative, rel=1e-4)
    assert got["zeroed"] == np.mean(want == 0)
    assert got["by_layer"] == pytest.approx([relative], rel=1e-3)


def test_each_tile_of_a_weight_has_a_scale(monkeypatch):
  monkeypatch.setattr(quantization_error, "TILE", 4)
  x = RNG.normal(size=(6, 9)).astype(np.float32)
  x[:4, 4:8] *= 1e3
  got = quantization_error.rounded(x, "INT8", "tile")
  want = np.empty_like(x)
  for i in range(0, 6, 4):
    for j in range(0, 9, 4):
      tile = x[i : i + 4, j : j + 4]
      scale = np.abs(tile).max() * np.float32(1 / 127)
      want[i : i + 4, j : j + 4] = np.rint(tile / scale) * scale
  np.testing.assert_allclose(got, want, rtol=1e-6)


def stored_in(x, order):
  """Encodes a moment [groups, n] to nearest, in NumPy's float64; decodes it."""
  magnitude = oracles.magnitudes(x)
  amax, _ = oracles.amax_amin(magnitude)
  if order == "INT8":
    levels = 127 if (x < 0).any() else 255
    codes = np.rint(magnitude / amax[:, None] * levels)
    return np.sign(x) * codes * amax[:, None] / levels
  name, *expansion = order.split(" + ")
  k = np.ones(len(x))
  if expansion:
    k = oracles.coat_power(magnitude, DTYPES[name]) / 16
  code = oracles.Expansion(amax, k, DTYPES[name])
  return np.sign(x) * code.decode(code.nearest(magnitude))


@pytest.mark.slow
def test_errors_of_moments_match_numpy():
  exact = Moments(*map(jnp.asarray, cases.moments((4, 128))))
  codecs = quantization_error.orders(128)
  mu, nu = (np.asarray(x, np.float64) for x in exact)
  update = mu / (np.sqrt(nu) + EPS)
  for name, (first, second) in codecs.items():
    stored = Moments(
      quantization_error.through(first, exact.mu),
      quantization_error.through(second, exact.nu),
    )
    got = quantization_error.moment_errors(exact, stored)
    mu_s, nu_s = (stored_in(np.asarray(x), name) for x in exact)
    error = mu_s / (np.sqrt(nu_s) + EPS) - update
    want = {
      "mu_error": np.linalg.norm(mu_s - mu) / np.linalg.norm(mu),
      "nu_error": np.linalg.norm(nu_s - nu) / np.linalg.norm(nu),
      "zeroed_mu": np.mean(mu_s == 0),
      "zeroed_nu": np.mean(nu_s == 0),
      "update_mse": np.mean(error**2),
      "update_error": np.linalg.norm(error) / np.linalg.norm(update),
      "kept_error": np.linalg.norm(error[nu_s > 0])
      / np.linalg.norm(update[nu_s > 0]),
    }
    # In f32, a value at a tie may be rounded differently.
    assert got == pytest.approx(want, rel=1e-2), name


TINY = dataclasses.replace(
  PRESETS["demo"]().model,
  num_layers=2,
  d_model=64,
  d_ff=128,
  num_heads=2,
  num_kv_heads=1,
)


@pytest.mark.slow
def test_captured_tensors_match_the_model():
  graph, params = nnx.split(
    Decoder(TINY, recipes.bf16(), dtype=jnp.float32, rngs=nnx.Rngs(0)),
    nnx.Param,
  )
  params = nnx.to_pure_dict(params)
  tokens = jnp.asarray(RNG.integers(0, 256, (2, 17)))
  found = capture(TINY, params, tokens)

  @jax.jit
  def gradients(params):
    def loss(params):
      return loss_fn(nnx.merge(graph, params), tokens)

    return jax.value_and_grad(loss)(params)

  loss, grads = gradients(params)
  assert float(found.loss) == pytest.approx(float(loss), rel=1e-6)
  # A weight's gradient is the input times the gradient of the output.
  grads = grads["layers"]
  for into, of, kernel in (
    ("into q, k, v", "q, k, v", grads["attention"]["qkv"]["linear"]),
    ("into projection", "projection", grads["attention"]["out"]),
    ("into gate, up", "gate, up", grads["mlp"]["gate_up"]),
    ("into down", "down", grads["mlp"]["down"]),
  ):
    x, g = found.values[into], found.gradients[of]
    want = np.einsum("lbtn,lbtm->lnm", x, g)
    kernel = np.asarray(kernel["kernel"]).reshape(want.shape)
    np.testing.assert_allclose(kernel, want, atol=1e-5 * np.abs(want).max())
  with pytest.raises(ValueError, match="must be a llama, got 'gpt2'"):
    capture(PRESETS["gpt2"]().model, params, tokens)


@pytest.mark.slow
def test_rows_become_figures_and_tables(tmp_path, monkeypatch, capsys):
  demo = dataclasses.replace(PRESETS["demo"](), model=TINY, batch=2, seq=16)
  monkeypatch.setitem(PRESETS, "demo", lambda: demo)
  chosen = ("bf16", "coat", "int8")
  recipes = {x: quantization_error.RECIPES[x] for x in chosen}
  for module in (quantization_error, quantization_tables):
    monkeypatch.setattr(module, "RECIPES", recipes)
  monkeypatch.setattr(quantization, "GROUP_SIZES", (64, 128))
  path = tmp_path / "rows.jsonl"
  other = {"bench": "quantization.layer", "case": {"preset": "llama_60m"}}
  old = {"bench": "quantization.layer", "case": {"preset": "demo"}}
  path.write_text(f"{json.dumps(other)}\n{json.dumps(old)}\n")
  assert quantization.main(["run", "--steps", "12", f"--rows={path}"]) == 0
  printed = [json.loads(x) for x in capsys.readouterr().out.splitlines()]
  # Rows of other models are kept; rows of the same model are replaced.
  assert read_rows(path, "quantization.") == [other, *printed]
  by_recipe = {
    name: quantization_tables.one(printed, "layer", recipe=name)
    for name in chosen
  }
  # Rounding errors are at most 2^-9 (BF16) and 2^-4 (E4M3) of a value, and 2^-8
  # of the largest value (INT8).
  assert by_recipe["bf16"]["output"] < 0.01 < by_recipe["coat"]["output"] < 0.1
  assert by_recipe["int8"]["output"] < by_recipe["coat"]["output"]

  line = ["plot", f"--rows={path}", f"--out={tmp_path}"]
  assert quantization.main(line) == 0
  text = capsys.readouterr().out
  assert "| `coat` |" in text and "INT8 / FP8" in text
  for name in ("quantization_moments.png", "quantization_tensors.png"):
    assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.parametrize(
  ("line", "message"),
  [
    (["run", "--preset=gpt2"], "must be a Llama, got gpt2"),
    (["run", "--steps=0"], "from 1 to"),
    (["plot", "--rows=none.jsonl"], "must contain rows of demo, got none"),
  ],
)
def test_wrong_arguments_exit_with_2(line, message, capsys):
  with pytest.raises(SystemExit) as stopped:
    quantization.main(line)
  assert stopped.value.code == 2
  assert message in capsys.readouterr().err
