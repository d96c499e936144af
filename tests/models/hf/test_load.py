# SPDX-License-Identifier: Apache-2.0
"""Compares loaded models with transformers, and their weights with files."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.models import (
  Decoder,
  ModelConfig,
  load_hf,
  loss_fn,
  save_hf,
)
from tests.comparing import jit
from tests.matrices import quick
from tests.models.hf.folders import (
  DATA,
  FAMILIES,
  by_tensor,
  copied,
  expected,
  fused,
  params_of,
  split,
  tensors_of,
)
from train.mesh import make_mesh, parse_mesh

SMALL = dict(num_layers=1, d_model=16, d_ff=16, num_heads=1)
MESHES = ("fsdp=8", "data=2,fsdp=2,tensor=2")


def loaded(folder, **options):
  options = {"recipe": recipes.bf16(), "dtype": jnp.float32, **options}
  return load_hf(folder, **options)


@pytest.mark.parametrize("name", quick(1, FAMILIES))
def test_model_matches_transformers(name):
  model = loaded(DATA / name)
  model.eval()  # The golden loss contains no auxiliary loss.
  graph, params = nnx.split(model, nnx.Param)
  params, golden = nnx.to_pure_dict(params), expected(name)
  tokens = jnp.asarray(golden["input_ids"], jnp.int32)

  @jit
  def run(params):
    def loss(params):
      return loss_fn(nnx.merge(graph, params), tokens)

    logits = nnx.merge(graph, params).logits(tokens)
    return logits, jax.value_and_grad(loss)(params)

  logits, (loss, gradients) = run(params)
  assert logits.dtype == jnp.float32
  # Only the summation order of f32 dot products differs: they have 64 to 160
  # terms, in two layers.
  largest = np.max(np.abs(golden["logits"]))
  assert np.max(np.abs(logits - golden["logits"])) < 1e-5 * largest
  np.testing.assert_allclose(loss, golden["loss"], rtol=1e-6)
  norms = jax.tree.map(jnp.linalg.norm, by_tensor(model.config, gradients))
  norms = fused(norms)
  want = {
    name.removeprefix("gradnorm/"): norm
    for name, norm in golden.items()
    if name.startswith("gradnorm/")
  }
  assert norms.keys() == want.keys()
  for name, found in norms.items():
    np.testing.assert_allclose(found, want[name], rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("mesh", quick(2, ["", *reversed(MESHES)]))
def test_each_value_is_loaded_into_its_place(mesh, tmp_path):
  """Loads Qwen2, which has biases, from several shards."""
  folder = split(copied(tmp_path / "m", "qwen2"))
  model = loaded(folder, mesh=make_mesh(parse_mesh(mesh)))
  params = params_of(model)
  found, want = by_tensor(model.config, params), tensors_of(folder)
  assert found.keys() == want.keys()
  for name, tensor in found.items():
    np.testing.assert_array_equal(tensor, want[name], err_msg=name)
  heads = want["model.layers.1.self_attn.q_proj.weight"].reshape(4, 16, 64)
  qkv = params["layers"]["attention"]["qkv"]["linear"]["kernel"][1]
  # Check two heads without the library's tables: query heads 2 and 3 belong to
  # the second key head.
  np.testing.assert_array_equal(qkv[:, 64:80].T, heads[2])
  np.testing.assert_array_equal(qkv[:, 80:96].T, heads[3])


@pytest.mark.parametrize(
  "name, mesh",
  quick(
    2,
    [
      (n, mesh)
      for n in ("llama", "gemma2", "gemma3", "gpt2")
      for mesh in MESHES
    ],
  ),
)
def test_model_on_a_mesh_is_sharded_and_matches_transformers(name, mesh):
  mesh = make_mesh(parse_mesh(mesh))
  assert mesh is not None
  model = loaded(DATA / name, mesh=mesh)
  kernel = model.layers.mlp.down.kernel[...]
  shares = mesh.shape["fsdp"] * mesh.shape["tensor"]
  assert kernel.addressable_shards[0].data.size == kernel.size // shares
  golden = expected(name)
  tokens = jnp.asarray(np.tile(golden["input_ids"], (4, 1)), jnp.int32)
  with jax.set_mesh(mesh):
    graph, state = nnx.split(model)
    logits = jit(lambda s: nnx.merge(graph, s).logits(tokens))(state)
  largest = np.max(np.abs(golden["logits"]))
  difference = np.abs(logits - np.tile(golden["logits"], (4, 1, 1)))
  assert np.max(difference) < 1e-5 * largest


CASTS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_weights_are_cast_to_param_dtype(name, param_dtype, tmp_path):
  dtype = CASTS[name]
  name = "model.layers.0.mlp.down_proj.weight"
  odd = tensors_of(DATA / "llama")[name].astype(dtype)
  info = ml_dtypes.finfo(dtype)
  # Include a subnormal and the largest number of the dtype.
  odd[0, :4] = [info.smallest_subnormal, -info.tiny, info.max, -0.0]
  folder = copied(tmp_path / "m", tensors={name: odd}, cast=dtype)
  model = loaded(folder, param_dtype=param_dtype)
  found, want = by_tensor(model.config, params_of(model)), tensors_of(folder)
  for name, tensor in found.items():
    kept = "float32" if tensor.ndim == 1 else param_dtype
    assert tensor.dtype == kept
    np.testing.assert_array_equal(
      np.asarray(tensor).view(np.uint8),
      want[name].astype(kept).view(np.uint8),
      err_msg=name,
    )


@pytest.mark.parametrize(
  "dtype, got",
  [
    (jnp.int32, "int32"),
    (jnp.float8_e4m3fn, "float8_e4m3fn"),
    ("x", "'x'"),
    (np.float64, "float64"),
  ],
)
def test_unsupported_weight_dtypes_are_refused(dtype, got, tmp_path):
  """In int32, all weights of this model would be zeros."""
  words = f"must be float32, bfloat16 or float16, got {got};"
  with pytest.raises(ValueError, match=f"load_hf: param_dtype {words}"):
    load_hf(DATA / "llama", param_dtype=dtype)
  text = ModelConfig(family="llama", **SMALL, num_kv_heads=1, vocab_size=8)
  model = Decoder(text, recipes.bf16(), rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match=f"save_hf: dtype {words}"):
    save_hf(model, tmp_path / "out", dtype=dtype)


@pytest.mark.parametrize("mesh", ["", "data=2,fsdp=2,tensor=2"])
@pytest.mark.parametrize(
  "name, value",
  [
    ("model.layers.1.self_attn.k_proj.weight", np.nan),
    ("model.norm.weight", np.inf),
  ],
)
def test_nonfinite_weights_are_refused(name, value, mesh, tmp_path):
  """Tests a parameter loaded from three tensors, and one loaded from one."""
  tensor = tensors_of(DATA / "llama")[name].copy()
  tensor.flat[-1] = value
  folder = copied(tmp_path / "m", tensors={name: tensor})
  with pytest.raises(ValueError) as caught:
    loaded(folder, mesh=make_mesh(parse_mesh(mesh)))
  file = folder / "model.safetensors"
  assert str(caught.value).startswith(
    f"load_hf: {file} must hold finite weights, got NaN or infinity in {name};"
  )


def test_weights_too_large_for_float16_are_refused(tmp_path):
  """The largest float16 number is 65504."""
  name = "model.layers.1.mlp.down_proj.weight"
  tensor = tensors_of(DATA / "llama")[name].copy()
  tensor[3, 5] = -65504
  folder = copied(tmp_path / "fits", tensors={name: tensor})
  loaded(folder, param_dtype=jnp.float16)
  tensor[3, 5] = -65536
  folder = copied(tmp_path / "m", tensors={name: tensor})
  words = f"got float16, in which some of {name} are infinite"
  with pytest.raises(ValueError, match=f"load_hf: param_dtype .* {words}"):
    loaded(folder, param_dtype=jnp.float16)
  words = f"finite in float16, got NaN or infinity in {name};"
  with pytest.raises(ValueError, match=f"save_hf: weights must be {words}"):
    save_hf(loaded(folder), tmp_path / "out", dtype="float16")
  assert not (tmp_path / "out").exists()


def test_tied_output_projection_may_be_stored_beside_the_embedding(tmp_path):
  tensors = tensors_of(DATA / "llama")
  embedding = tensors["model.embed_tokens.weight"]
  absent = {"lm_head.weight": None}
  twice = {
    "lm_head.weight": embedding,
    # Old checkpoints of Llama contain this tensor.
    "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
  }
  for i, change in enumerate((absent, twice)):
    folder = copied(tmp_path / f"{i}", tensors=change, tie_word_embeddings=True)
    model = loaded(folder)
    assert model.head is None
    np.testing.assert_array_equal(model.embedding[...], embedding)


def test_gpt2_tensor_names_may_lack_their_prefix(tmp_path):
  """The published checkpoint lacks the prefix, and has buffers."""
  golden = tensors_of(DATA / "gpt2")
  published = {
    name.removeprefix("transformer."): x for name, x in golden.items()
  }
  for i in range(2):
    published[f"h.{i}.attn.bias"] = np.ones((1, 1, 256, 256), np.float32)
    published[f"h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
  published["lm_head.weight"] = golden["transformer.wte.weight"]
  tensors = dict.fromkeys(golden) | published
  folder = copied(tmp_path / "m", "gpt2", tensors=tensors, n_ctx=256)
  model = loaded(folder)
  found = by_tensor(model.config, params_of(model))
  assert found.keys() == golden.keys()
  for name, tensor in found.items():
    np.testing.assert_array_equal(tensor, golden[name], err_msg=name)
  # Check the first head of v in layer 1 without the library's tables.
  qkv = model.layers.attention.qkv.linear.kernel[1]
  np.testing.assert_array_equal(
    qkv[:, 32:48], golden["transformer.h.1.attn.c_attn.weight"][:, 128:144]
  )
  surplus = copied(
    tmp_path / "s",
    "gpt2",
    tensors={"transformer.h.0.ln_3.bias": golden["transformer.h.0.ln_1.bias"]},
  )
  with pytest.raises(ValueError, match=r"got transformer.h.0.ln_3.bias too"):
    loaded(surplus)


def test_default_recipe_is_coat():
  model = load_hf(DATA / "llama")
  assert model.layers.mlp.recipe == recipes.coat()
  assert model.dtype == jnp.bfloat16
  tokens = jnp.ones((1, 4), jnp.int32)
  logits = nnx.jit(lambda model, tokens: model.logits(tokens))(model, tokens)
  assert logits.shape == (1, 4, 384) and logits.dtype == jnp.float32


def test_files_may_be_symbolic_links(tmp_path):
  """In the cache of huggingface_hub, all files are links."""
  blobs, folder = copied(tmp_path / "blobs"), tmp_path / "m"
  folder.mkdir()
  for file in blobs.iterdir():
    (folder / file.name).symlink_to(file)
  assert loaded(folder).config == loaded(DATA / "llama").config
