# SPDX-License-Identifier: Apache-2.0
"""Compares loaded vision towers with transformers, and with NumPy in float64.

The NumPy tower reads tensors by their names in the checkpoint. It uses none of
the code that loads a tower.
"""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.models import VisionConfig, VisionTower, load_hf, param_shardings
from coat_jax.models.initialization import stored_in
from coat_jax.models.params import mesh_axes
from tests.comparing import assert_close, jit
from tests.models.hf.folders import DATA, expected, params_of, tensors_of
from train.memory.count import residual_bytes
from train.mesh import make_mesh, parse_mesh

FAMILIES = ("vit", "clip_vision", "siglip_vision")
CONFIG = VisionConfig(
  family="siglip_vision",
  num_layers=2,
  d_model=64,
  d_ff=128,
  num_heads=4,
  image_size=28,
  patch_size=14,
)


def norm(x, w, name, eps):
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
  return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def product(x, w, name):
  return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def attention(q, k, v):
  q, k, v = (x.reshape(2, -1, 4, 16) for x in (q, k, v))
  p = np.exp(np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(q.shape[-1]))
  p = p / p.sum(-1, keepdims=True)
  return np.einsum("bnts,bsnh->btnh", p, v).reshape(2, q.shape[1], -1)


GELU = {
  "vit": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
  "clip_vision": lambda x: x / (1 + np.exp(-1.702 * x)),
  "siglip_vision": lambda x: (
    x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
  ),
}


def tower_in_numpy(name, images):
  """Returns ([embedding, output of each layer], pooled vector)."""
  w = {k: np.float64(x) for k, x in tensors_of(DATA / name).items()}
  eps = json.loads((DATA / name / "config.json").read_text())["layer_norm_eps"]
  w = {k.removeprefix("vit."): x for k, x in w.items()}
  patch = "embeddings.patch_embedding"
  if name == "vit":
    patch = "embeddings.patch_embeddings.projection"
  # This is a convolution whose windows do not overlap.
  rows = [
    np.einsum("bcij,dcij->bd", images[..., i : i + 14, j : j + 14], kernel)
    for kernel in (w[f"{patch}.weight"],)
    for i in (0, 14)
    for j in (0, 14)
  ]
  x = np.stack(rows, axis=1) + w.get(f"{patch}.bias", 0)
  token = w.get("embeddings.cls_token", w.get("embeddings.class_embedding"))
  if token is not None:
    token = np.broadcast_to(token.reshape(1, 1, -1), (2, 1, 64))
    x = np.concatenate([token, x], axis=1)
  table = [k for k in w if "embeddings.position_embedding" in k]
  x = x + w[table[0]]
  if name == "clip_vision":
    x = norm(x, w, "pre_layrnorm", eps)
  hidden = [x]
  for i in range(2):
    if name == "vit":
      start = f"encoder.layer.{i}."
      qkv = [
        start + f"attention.attention.{n}" for n in ("query", "key", "value")
      ]
      out, up, down = "attention.output", "intermediate", "output"
      out, up, down = (f"{start}{n}.dense" for n in (out, up, down))
      norms = [start + "layernorm_before", start + "layernorm_after"]
    else:
      start = f"encoder.layers.{i}."
      qkv = [start + f"self_attn.{n}_proj" for n in "qkv"]
      out, up, down = start + "self_attn.out_proj", start + "mlp.fc1", ""
      down = start + "mlp.fc2"
      norms = [start + "layer_norm1", start + "layer_norm2"]
    y = norm(x, w, norms[0], eps)
    x = x + product(attention(*(product(y, w, n) for n in qkv)), w, out)
    y = GELU[name](product(norm(x, w, norms[1], eps), w, up))
    x = x + product(y, w, down)
    hidden.append(x)
  if name == "vit":
    return hidden, product(norm(x, w, "layernorm", eps)[:, 0], w, "classifier")
  normed = norm(x, w, "post_layernorm", eps)
  if name == "clip_vision":
    return hidden, normed[:, 0]
  table, bias = (w[f"head.attention.in_proj_{n}"] for n in ("weight", "bias"))
  probe = np.broadcast_to(w["head.probe"], (2, 1, 64))
  sources = (probe, normed, normed)
  parts = zip(sources, np.split(table, 3), np.split(bias, 3), strict=True)
  y = attention(*(x @ kernel.T + b for x, kernel, b in parts))
  y = product(y, w, "head.attention.out_proj")
  up = product(norm(y, w, "head.layernorm", eps), w, "head.mlp.fc1")
  return hidden, (y + product(GELU[name](up), w, "head.mlp.fc2"))[:, 0]


@pytest.mark.parametrize("name", FAMILIES)
def test_tower_matches_transformers(name):
  golden = expected(name)
  images = jnp.asarray(golden["pixel_values"])
  how: dict[str, Any] = dict(recipe=recipes.bf16(), dtype=jnp.float32)
  graph, state = nnx.split(load_hf(DATA / name, **how))

  @jit
  def run(state, images):
    tower = nnx.merge(graph, state)
    features = [tower.features(images, layer=i) for i in (0, 1, -1)]
    return tower(images), features, tower.pooled(images)

  output, features, pooled = run(state, images)
  # Only the summation order of f32 dot products differs: they have 64 to 588
  # terms, in two layers.
  assert_close(output, golden["output"], 1e-5)
  hidden, want = tower_in_numpy(name, golden["pixel_values"].astype(np.float64))
  assert_close(features, hidden, 1e-5)
  assert_close(pooled, want, 1e-5)


def gradients(config, recipe, mesh=None, **options):
  """Returns (loss, hidden states) and gradients; the loss is a weighted sum."""
  make = lambda r: VisionTower(config, recipe=r, rngs=nnx.Rngs(0), **options)  # noqa: E731
  graph, params = nnx.split(make(recipe), nnx.Param)
  params = nnx.to_pure_dict(params)
  keys = jax.random.split(jax.random.key(1))
  shape = (8, 3, config.image_size, config.image_size)
  images = jax.random.normal(keys[0], shape)
  dy = jax.random.normal(keys[1], (8, config.num_tokens, config.d_model))

  def loss(params):
    hidden = nnx.merge(graph, params)(images)
    return jnp.sum(hidden.astype(jnp.float32) * dy), hidden

  run = jit(jax.value_and_grad(loss, has_aux=True))
  if mesh is None:
    return run(params)
  params = jax.device_put(params, param_shardings(mesh, params))
  kernel = params["layers"]["mlp"]["up"]["kernel"]
  assert kernel.addressable_shards[0].data.size < kernel.size
  with jax.set_mesh(mesh):
    return run(params)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["fsdp=8", "data=2,fsdp=2,tensor=2"])
def test_tower_on_a_mesh_matches_one_device(sizes):
  mesh = make_mesh(parse_mesh(sizes))
  assert mesh is not None
  how: dict[str, Any] = dict(dtype=jnp.float32)
  want = gradients(CONFIG, recipes.coat(), **how)
  recipe = dataclasses.replace(recipes.coat(), axes=mesh_axes(mesh.shape))
  # A value that is off by an ulp may be rounded to another code.
  found = gradients(CONFIG, recipe, mesh, **how)
  assert_close(found[0][1], want[0][1], 0.02)
  assert_close(found[1], want[1], 0.05)


def test_tensor_axis_must_divide_the_tokens():
  """With CLIP's class token, the number of tokens is odd."""
  mesh = make_mesh(parse_mesh("data=2,fsdp=2,tensor=2"))
  assert mesh is not None
  config = dataclasses.replace(CONFIG, family="clip_vision")
  recipe = dataclasses.replace(recipes.coat(), axes=mesh_axes(mesh.shape))
  images = jax.ShapeDtypeStruct((8, 3, 28, 28), jnp.float32)
  tower = nnx.eval_shape(
    lambda: VisionTower(config, recipe=recipe, rngs=nnx.Rngs(0))
  )
  with jax.set_mesh(mesh), pytest.raises(ValueError, match="5 tokens, got 2"):
    jax.eval_shape(tower, images)


@pytest.mark.slow
def test_remat_changes_no_gradient():
  want = gradients(CONFIG, recipes.coat())
  assert_close(gradients(CONFIG, recipes.coat(), remat="full"), want, 0)
  with pytest.raises(ValueError, match="norms save their inputs in FP8"):
    gradients(CONFIG, recipes.bf16(), remat="fp8")


def test_store_casts_weights_but_not_norms_and_biases():
  tower = nnx.eval_shape(
    lambda: VisionTower(
      CONFIG,
      recipes.coat(),
      store=stored_in("", jnp.bfloat16),
      rngs=nnx.Rngs(0),
    )
  )
  assert tower.layers.mlp.recipe == recipes.coat()
  for path, x in jax.tree.leaves_with_path(params_of(tower)):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    is_weight = name.endswith(("kernel", "position_embed"))
    assert x.dtype == (jnp.bfloat16 if is_weight else jnp.float32), name


def test_pixels_outside_whole_patches_are_ignored():
  """SigLIP's image size 384, for example, is not a multiple of 14."""
  config = dataclasses.replace(CONFIG, image_size=30, family="vit")
  assert config.num_patches == 4 and config.num_tokens == 5
  tower = VisionTower(config, recipe=recipes.bf16(), rngs=nnx.Rngs(0))
  images = np.random.default_rng(0).normal(size=(1, 3, 30, 30))
  images = jnp.asarray(images, jnp.float32)
  inside = images.at[:, :, 28:].set(9).at[..., 28:].set(9)
  np.testing.assert_array_equal(tower.patches(images), tower.patches(inside))
  assert jnp.any(tower.patches(images) != tower.patches(images + 1))


def test_wrong_layers_wrong_images_and_a_missing_pool_are_refused():
  config = dataclasses.replace(CONFIG, has_pool=False)
  tower = nnx.eval_shape(
    lambda: VisionTower(config, recipes.bf16(), rngs=nnx.Rngs(0))
  )
  images = jnp.zeros((1, 3, 28, 28))
  last = jnp.zeros((1, 28, 28, 3))
  for f, words in (
    (lambda tower: tower.features(images, layer=3), "must be at most 2, got 3"),
    (lambda tower: tower.features(images, layer=-4), "from -3 to 2, got -4"),
    (lambda tower: tower(last), "put channels first"),
    (lambda tower: tower.pooled(images), "has_pool=False; pool the hidden"),
  ):
    with pytest.raises(ValueError, match=words):
      nnx.eval_shape(f, tower)


@pytest.mark.parametrize(
  "change, words",
  [
    (dict(family="sigllip_vision"), "did you mean 'siglip_vision'"),
    (dict(num_heads=64), "got d_model 64 and num_heads 64"),
    (dict(patch_size=29), "at most image_size, got 29 and 28"),
    (
      dict(num_classes=5),
      "num_classes applies only to family vit, got 5 for",
    ),
    (dict(family="clip_vision", has_pool=False), "got family clip_vision and"),
    (dict(norm_eps=0.0), "norm_eps must be a number from"),
  ],
)
def test_impossible_configs_are_refused(change, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(CONFIG, **change)


def test_layer_saves_fp8_inputs_of_norms_and_gelu():
  """Counts bytes per token at the shapes of SigLIP-so400m."""
  d, f, heads = 1152, 4304, 16
  sizes = dict(d_model=d, d_ff=f, num_heads=heads)
  config = dataclasses.replace(CONFIG, **sizes)
  tokens = 256
  found = residual_bytes(config, recipes.coat(), tokens=tokens)["total"]
  # A layer saves the codes of two norms and GELU, with one BF16 scale per 16;
  # mean and rstd of two norms; q, k, v and the output in BF16; a log-sum-exp
  # per head; and positions, although there is no RoPE. Per-tensor scales take
  # less than 1 byte per token.
  want = 18 / 16 * (2 * d + f) + 2 * 8 + 4 * 2 * d + 4 * heads + 4
  assert abs(found - want) < 1
  plain = residual_bytes(config, recipes.bf16(), tokens=tokens)["total"]
  assert found <= 0.36 * plain
