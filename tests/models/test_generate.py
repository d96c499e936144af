# SPDX-License-Identifier: Apache-2.0
"""Compares generated tokens with transformers and with uncached models."""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.models import generate as generate_tokens
from coat_jax.models import load_hf
from coat_jax.models.cache import cached_forward, empty_cache
from coat_jax.models.generate import _decode, _in_dtype, _prefill, bucket
from coat_jax.recipes import MeshAxes
from tests.models.hf.folders import DATA, expected
from tests.models.test_cache import CONFIGS, build, without_cache
from train.mesh import make_mesh, parse_mesh

# The package has a function with the same name as the module.
MODULE = sys.modules["coat_jax.models.generate"]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8]]


@pytest.fixture(scope="module")
def llama():
  return read("llama")


def read(name):
  return load_hf(DATA / name, recipe=recipes.bf16(), dtype=jnp.float32)


@pytest.fixture(scope="module")
def small():
  return build(CONFIGS["llama"], recipes.coat())


def generate(model, prompts, **options):
  """Returns the new tokens of each prompt."""
  return generate_tokens(model, prompts, **options).tokens


def greedy_without_cache(run, prompt, count):
  """Returns greedy tokens; runs the whole sequence again for each of them."""
  row: Any = list(prompt)
  margins = []
  for _ in range(count):
    # Pad to one size, so that `run` compiles once. Pads at the end change no
    # earlier logits.
    padded = np.pad(np.int32(row), (0, 32 - len(row)))
    logits = np.asarray(run(padded)[len(row) - 1])
    margins.append(np.diff(np.sort(logits)[-2:]))
    row.append(int(np.argmax(logits)))
  # A different summation order changes logits by far less than the gap between
  # the two largest, so it cannot change the choice.
  assert min(margins) > 1e-3
  return row[len(prompt) :]


def test_greedy_tokens_match_transformers(llama):
  golden = expected("llama")
  greedy = golden["greedy"][0].tolist()
  prompt, want = greedy[:8], greedy[8:]
  assert prompt == golden["input_ids"][0, :8].tolist()
  assert generate(llama, [prompt], max_new_tokens=16) == [want]
  # Use a longer prompt too, so that the short one is padded.
  longer = golden["input_ids"][1, :13].tolist()
  both = generate(llama, [longer, prompt], max_new_tokens=16)
  assert both[1] == want and len(both[0]) == 16


@pytest.mark.slow
def test_greedy_tokens_with_norms_of_q_and_k_match_transformers():
  greedy = expected("qwen3")["greedy"][0].tolist()
  tokens = generate(read("qwen3"), [greedy[:8]], max_new_tokens=16)
  assert tokens == [greedy[8:]]


def test_greedy_tokens_with_learned_positions_match_transformers():
  model, golden = read("gpt2"), expected("gpt2")
  greedy = golden["greedy"][0].tolist()
  # Use a longer prompt too, so that the short one is padded.
  prompts = [greedy[:8], golden["input_ids"][1, :13].tolist()]
  tokens = generate(model, prompts, max_new_tokens=16)
  assert tokens[0] == greedy[8:]
  with pytest.raises(ValueError) as caught:
    generate(model, [[1] * 250], max_new_tokens=8)
  assert str(caught.value) == (
    "generate: a prompt of 250 tokens and 8 new ones: gpt2 has learned "
    "positions for 256 tokens, got 257; pass shorter sequences"
  )


def test_batched_prompts_match_single_prompts_without_a_cache(small):
  run = without_cache(build(CONFIGS["llama"], recipes.bf16()))
  together = generate(small, PROMPTS, max_new_tokens=9)
  assert together == [greedy_without_cache(run, each, 9) for each in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_tokens_with_alternating_layers_match_those_without_a_cache(name):
  model = build(CONFIGS[name], recipes.coat())
  run = without_cache(build(CONFIGS[name], recipes.bf16()))
  together = generate(model, PROMPTS, max_new_tokens=9)
  assert together == [greedy_without_cache(run, each, 9) for each in PROMPTS]


def test_each_row_ends_with_its_first_stop_token(small):
  free = generate(small, PROMPTS, max_new_tokens=9)
  stops = [free[0][2], free[1][5]]
  got = generate(small, PROMPTS, max_new_tokens=9, stop_tokens=stops)
  for tokens, all_tokens in zip(got, free, strict=True):
    found = [i for i, token in enumerate(all_tokens) if token in stops]
    assert tokens == all_tokens[: found[0] + 1 if found else 9]
  assert len({len(tokens) for tokens in got}) > 1


def test_decoding_ends_when_all_rows_have_stopped(small, monkeypatch):
  counts = []

  def counting(*args):
    result = _decode(*args)
    counts.append(int(result[1]))
    return result

  monkeypatch.setattr(MODULE, "_decode", counting)
  free = generate(small, PROMPTS, max_new_tokens=9)
  stops = [tokens[0] for tokens in free]
  got = generate(small, PROMPTS, max_new_tokens=9, stop_tokens=stops)
  assert got == [[token] for token in stops]
  assert counts == [9, 1]


def test_sizes_are_rounded_up_to_a_power_of_two_or_whole_chunks():
  sizes = {1: 16, 16: 16, 17: 32, 200: 256, 256: 256, 257: 512, 513: 768}
  assert {size: bucket(size) for size in sizes} == sizes


def test_calls_with_other_options_reuse_compiled_programs(small):
  programs: Any = _prefill, _decode

  def compiled():
    return [program._cache_size() for program in programs]

  options = dict(max_new_tokens=9, temperature=0.5, top_k=3)
  generate(small, PROMPTS, **options)
  before = compiled()
  for other in (
    dict(max_new_tokens=12, temperature=0.7, top_k=5, seed=1),
    dict(max_new_tokens=1, cache_size=32),
  ):
    generate(small, [[1], [2, 3, 4], list(range(16))], **options | other)
  assert compiled() == before
  # Check that the counter works: another size must be compiled.
  generate(small, PROMPTS, **options, cache_size=40)
  assert compiled() == [n + 1 for n in before]


def test_cache_size_does_not_change_tokens(small):
  want = generate(small, PROMPTS, max_new_tokens=9)
  assert generate(small, PROMPTS, max_new_tokens=9, cache_size=40) == want


def test_model_that_computes_nan_is_refused(small):
  """One prompt's logits are NaN after two tokens; their argmax would be 0."""
  free = generate(small, PROMPTS, max_new_tokens=9)
  token = free[0][1]
  assert token not in [*free[0][:1], *free[1], *free[2], *sum(PROMPTS, [])]
  model = nnx.clone(small)
  for value in (np.nan, np.inf):
    model.embedding.set_value(model.embedding[...].at[token].set(value))
    with pytest.raises(ValueError) as caught:
      generate(model, PROMPTS, max_new_tokens=9)
    assert str(caught.value).startswith(
      "generate: logits must be finite, got NaN or infinity for token 3 after "
      "prompt 0; "
    )
    # NaN after the last requested token does not matter.
    few = generate(model, PROMPTS, max_new_tokens=2)
    assert few == [row[:2] for row in free]
    stopped = generate(model, PROMPTS, max_new_tokens=9, stop_tokens=[token])
    assert stopped == [free[0][:2], *free[1:]]


def test_each_token_is_sampled_with_a_separate_key(small):
  """With equal logits and one key, all tokens of a row would be the same."""
  model = nnx.clone(small)
  model.head.set_value(jnp.zeros_like(model.head[...]))
  options = dict(max_new_tokens=9, temperature=1.0, top_k=40)
  drawn = generate(model, PROMPTS, **options)
  for i, row in enumerate(drawn):
    # By chance, 1 of 170,000 rows has 4 or fewer different tokens.
    assert len(set(row)) > 4
    assert all(row != other for other in drawn[:i])


@pytest.mark.slow
def test_sampled_tokens_depend_only_on_seed_and_row(small):
  options = dict(max_new_tokens=9, temperature=1.5)
  one = generate(small, PROMPTS, **options, seed=1)
  assert generate(small, PROMPTS, **options, seed=1) == one
  assert generate(small, PROMPTS[:1], **options, seed=1) == one[:1]
  assert generate(small, PROMPTS, **options, seed=2) != one
  same = generate(small, [PROMPTS[0]] * 3, **options, seed=1)
  assert same[0] == one[0] and len({tuple(tokens) for tokens in same}) == 3
  # These options leave only the most probable token.
  greedy = generate(small, PROMPTS, max_new_tokens=9)
  for narrow in (dict(top_k=1), dict(top_p=1e-6)):
    assert generate(small, PROMPTS, **options, **narrow) == greedy


@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe", "qwen3"])
def test_casting_weights_before_generation_changes_no_hidden_state(name):
  model = build(CONFIGS[name], recipes.coat(), dtype=jnp.bfloat16)
  graph, params = nnx.split(model)
  tokens = jnp.arange(24, dtype=jnp.int32).reshape(2, 12) % 40

  @jax.jit
  def run(params):
    model = nnx.merge(graph, params)
    cache = empty_cache(model, jnp.int32([0, 3]), size=12)
    return cached_forward(model, tokens, cache)[0]

  stored, cast = run(params), run(_in_dtype(graph, params))
  assert stored.dtype == jnp.bfloat16
  # Leave out padding, whose hidden states have no meaning.
  np.testing.assert_array_equal(cast[0], stored[0])
  np.testing.assert_array_equal(cast[1, 3:], stored[1, 3:])


def test_all_weights_except_norms_and_biases_are_cast():
  model = build(CONFIGS["qwen2"], recipes.coat(), dtype=jnp.bfloat16)
  graph, params = nnx.split(model)
  found = nnx.to_pure_dict(_in_dtype(graph, params))
  dtypes = {
    jax.tree_util.keystr(path, simple=True, separator="/"): str(x.dtype)
    for path, x in jax.tree.leaves_with_path(found)
  }
  assert dtypes == {
    name: "float32" if name.endswith(("scale", "bias")) else "bfloat16"
    for name in dtypes
  }
  assert "layers/attention/qkv/linear/bias" in dtypes
  # Generation works with these dtypes.
  assert len(generate(model, [[1, 2]], max_new_tokens=3)[0]) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
  "sizes", ["data=2,fsdp=2,tensor=2", "data=4,tensor=2", "fsdp=8"]
)
def test_tokens_on_a_mesh_match_one_device(small, sizes):
  mesh = make_mesh(parse_mesh(sizes))
  axes = MeshAxes(tensor="tensor" if "tensor" in sizes else None)
  recipe = dataclasses.replace(recipes.coat(), axes=axes)
  model = build(CONFIGS["llama"], recipe, mesh=mesh)
  # Three rows cannot be split over four or eight devices.
  for options in (dict(), dict(temperature=1.5, top_k=5)):
    want = generate(small, PROMPTS, max_new_tokens=9, **options)
    with jax.set_mesh(mesh):
      got = generate(model, PROMPTS, max_new_tokens=9, **options)
    assert got == want
  with pytest.raises(ValueError, match="names the axis 'data' .* got no mesh"):
    generate(model, PROMPTS, max_new_tokens=9)


@pytest.mark.parametrize(
  "prompts, options, message",
  [
    ([], {}, "at least one prompt, got none"),
    ([[1], []], {}, "got none in prompt 1"),
    ([[1, 40]], {}, "below the vocabulary size 40, got 1 to 40"),
    ([[-1]], {}, "prompt 0 must be at least 0 and below"),
    ([[1]], dict(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
    ([[1]], dict(stop_tokens=[40]), "stop_tokens must be at least 0 and below"),
    ([[1]], dict(temperature=-0.1), "temperature .* at least 0 .* got -0.1"),
    ([[1]], dict(temperature=1e39), "temperature .* finite, got 1e"),
    ([[1]], dict(temperature=float("nan")), "temperature .* got nan"),
    ([[1]], dict(temperature=1.0, top_k=0), "top_k must be at least 1, got 0"),
    ([[1]], dict(temperature=1.0, top_p=0.0), "top_p .* got 0.0"),
    ([[1]], dict(temperature=1.0, top_p=1.1), "top_p .* got 1.1"),
    ([[1]], dict(top_k=3), "apply to sampling, got temperature 0"),
    ([[1]], dict(top_p=0.9), "apply to sampling, got temperature 0"),
    ([[1]], dict(seed=-1), "seed must be at least 0"),
    ([[1] * 17], dict(cache_size=35), "must be at least 36, got 35"),
  ],
)
def test_bad_input_is_refused(small, prompts, options, message):
  with pytest.raises(ValueError, match=f"generate: .*{message}"):
    generate(small, prompts, **{"max_new_tokens": 4, **options})
