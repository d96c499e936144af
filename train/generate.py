# SPDX-License-Identifier: Apache-2.0
"""Generates texts that continue prompts.

  python -m train.generate RUN --prompt "def main("
  python -m train.generate RUN --prompt "One" --prompt "Two" --temperature 0
  python -m train.generate Llama-3.2-1B-Instruct --prompt "Who?" --chat

The first argument is a Hugging Face folder, or a run's folder, whose newest
checkpoint is read. The model continues all prompts at once, on one device.

Texts are printed to standard output, and speeds to standard error.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from coat_jax.models import Generation, generate
from coat_jax.models.generate import bucket
from coat_jax.models.sampling import make_sampling
from train.command_line import read_options
from train.options import Flag, read_path, shown
from train.run.exits import exit_status, say
from train.run.signals import Signals
from train.source import Compute, Source, decoder_of, open_source


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
  """Generates texts that continue prompts, and prints them.

    python -m train.generate RUN_OR_DIR --prompt TEXT [options]

  Attributes:
    model: Folder of a run, or a Hugging Face folder.
    prompt: The beginning of a text. Repeat the option for more texts.
    max_tokens: Maximum number of tokens to add to each prompt.
    temperature: Temperature of sampling; 0 picks the most probable token.
    top_k: Sample from the k most probable tokens.
    top_p: Sample from the smallest set of tokens whose total probability is at
      least this number.
    seed: Seed of the sampling.
    chat: Format each prompt as a user's message with the tokenizer's chat
      template, and print only the answer.
    tokenizer: A tokenizer.json to use.
    compute: The dtype to compute in.
  """

  model: Annotated[Positional[str], arg(metavar="RUN_OR_DIR")]
  prompt: Annotated[
    UseAppendAction[tuple[str, ...]],
    shown("required, repeatable", metavar="TEXT"),
  ]
  max_tokens: int = 64
  temperature: float = 0.8
  top_k: Annotated[int | None, shown("default: all tokens")] = None
  top_p: Annotated[float | None, shown("default: all tokens")] = None
  seed: int = 0
  chat: Flag = False
  tokenizer: Annotated[str | None, shown("default: the model's own")] = None
  compute: Annotated[
    Compute | None, shown("default: bfloat16, or what the run used")
  ] = None


def encode(config: GenerateConfig, source: Source) -> list[list[int]]:
  """Encodes the prompts, and checks their lengths."""
  text, out = source.text, []
  if config.chat and text.chat is None:
    raise ValueError(
      "generate: --chat needs a tokenizer with a chat template, got none; put "
      "chat_template.jinja next to tokenizer.json, or leave --chat out"
    )
  for prompt in config.prompt:
    if config.chat and text.chat is not None:
      messages = [{"role": "user", "content": prompt}]
      # The template adds the token that texts begin with.
      tokens = text.encode(
        text.chat.render(messages, add_generation_prompt=True)
      )
    else:
      tokens = text.encode_from_start(prompt)
    if not tokens:
      raise ValueError(
        f"generate: a prompt must have at least one token, got {prompt!r}; "
        "pass a --prompt that is not empty"
      )
    if len(tokens) + config.max_tokens > source.length:
      raise ValueError(
        "generate: a prompt and --max-tokens must fit into the "
        f"{source.length} tokens that the model was trained to see, got "
        f"{len(tokens)} + {config.max_tokens}; shorten the prompt, or lower "
        "--max-tokens"
      )
    out.append(tokens)
  return out


def run(config: GenerateConfig) -> None:
  make_sampling(config.temperature, config.top_k, config.top_p)
  if config.max_tokens < 1:
    raise ValueError(
      f"generate: --max-tokens must be at least 1, got {config.max_tokens}; "
      "pass the number of tokens to add"
    )
  if not config.prompt:
    raise ValueError("generate: needs a prompt, got none; pass --prompt")
  folder = read_path("model", config.model)
  source = open_source(folder, config.tokenizer, config.compute)
  prompts = encode(config, source)
  model = decoder_of(source.load())

  def call(most: int) -> Generation:
    return generate(
      model,
      prompts,
      max_new_tokens=most,
      temperature=config.temperature,
      top_k=config.top_k,
      top_p=config.top_p,
      stop_tokens=source.text.stop_tokens,
      seed=config.seed,
      cache_size=bucket(max(map(len, prompts))) + bucket(config.max_tokens),
    )

  # The first call compiles, so the time of the second excludes compilation.
  started = time.monotonic()
  call(1)
  compiled_s = time.monotonic() - started
  found = call(config.max_tokens)

  for i, tokens in enumerate(found.tokens):
    if i:
      print("---")
    added = source.text.decode(tokens)
    if not config.chat:
      added = config.prompt[i] + source.text.decode_after(prompts[i], tokens)
    print(added)
  say(describe_speed(prompts, found, compiled_s))


def describe_speed(
  prompts: list[list[int]], found: Generation, compiled_s: float
) -> str:
  """Describes the speeds; `prefill_s` includes the first new token."""
  read = sum(map(len, prompts))
  added = sum(map(len, found.tokens)) - len(prompts)
  speeds = [f"prompts: {read} tokens, {read / found.prefill_s:,.0f} tokens/s"]
  if added:
    speed = added / found.decode_s
    speeds.append(f"decoding: {added} tokens, {speed:,.0f} tokens/s")
  return "; ".join([*speeds, f"compiled in {compiled_s:.1f} s"])


def main(arguments: Sequence[str] | None = None) -> int:
  with Signals():
    config = read_options(GenerateConfig, "generate", arguments)
    return exit_status(
      lambda: run(config), smaller="lower --max-tokens, or pass fewer --prompt"
    )


if __name__ == "__main__":
  sys.exit(main())
