# SPDX-License-Identifier: Apache-2.0
"""Runs lm-evaluation-harness on a `Decoder`; needs the `eval` extra.

`DecoderLM` follows the harness's own rules for Hugging Face models. A context
that is too long loses its beginning. An empty context is replaced by the token
that `prefix_token` returns. Generated text is cut before the first stop string.

There is one difference, for texts that are scored as a whole. `DecoderLM` puts
exactly one token before such a text and does not score this token. The harness
also scores a token that the tokenizer adds at the start.

  lm = DecoderLM(model, text, length=2048)
  lm_eval.simple_evaluate(lm, tasks=["hellaswag"])
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from coat_jax.models import Decoder, generate
from train.data.text import Text
from train.evaluation.perplexity import prefix_token, windows
from train.evaluation.scoring import Request, Scorer

_MOST = 256  # Maximum number of new tokens if a task sets no maximum.
_MOST_NAMES = (
  "max_gen_toks",
  "max_new_tokens",
  "max_tokens",
  "max_completion_tokens",
)


class DecoderLM(TemplateLM):
  """Runs a decoder with the `bf16` recipe for `lm_eval.simple_evaluate`."""

  def __init__(
    self, model: Decoder, text: Text, *, length: int, batch: int = 8
  ):
    """Wraps a model; `batch` rows of up to `length` tokens run at once."""
    super().__init__()
    self._model, self._text, self._batch = model, text, batch
    self._scorer = Scorer(model, length=length, batch=batch)
    self._prefix = prefix_token(text)
    self._stops: dict[tuple[str, ...], tuple[int, ...]] = {}

  @property
  def eot_token_id(self) -> int:
    return self._prefix

  @property
  def max_length(self) -> int:
    return self._scorer.length

  @property
  def max_gen_toks(self) -> int:
    return min(_MOST, self.max_length // 2)

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
  ) -> list[int]:
    """Encodes a text; by default, prepends the tokens that texts begin with."""
    del kwargs
    if add_special_tokens is False:
      return self._text.encode(string)
    return self._text.encode_from_start(string)

  def _loglikelihood_tokens(
    self,
    requests: list[tuple[tuple[str, str], list[int], list[int]]],
    disable_tqdm: bool = False,
    **kwargs: Any,
  ) -> list[tuple[float, bool]]:
    del kwargs
    asked = [Request(context, tokens) for _, context, tokens in requests]
    found = {}
    with _progress("loglikelihood", len(asked), disable_tqdm) as bar:
      order = _longest_first(asked, lambda one: len(one[0]) + len(one[1]))
      for i, score in self._scorer.score_each(order):
        found[i] = score.total, score.is_greedy
        self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
        bar.update()
    return [found[i] for i in range(len(asked))]

  def loglikelihood_rolling(
    self, requests: list, disable_tqdm: bool = False
  ) -> list[float]:
    strings = [request.args[0] for request in requests]
    found = [0.0] * len(strings)
    with _progress("loglikelihood_rolling", len(strings), disable_tqdm) as bar:
      asked = (
        (i, Request(tokens[start:middle], tokens[middle:end]))
        for i, string in enumerate(strings)
        for tokens in [[self._prefix, *self._text.encode(string)]]
        for start, middle, end in windows(
          len(tokens), self.max_length, self.max_length
        )
      )
      for i, score in self._scorer.score_each(asked):
        found[i] += score.total
        bar.update(i - bar.n)
    for string, total in zip(strings, found, strict=True):
      self.cache_hook.add_partial("loglikelihood_rolling", (string,), total)
    return found

  def generate_until(
    self, requests: list, disable_tqdm: bool = False
  ) -> list[str]:
    asked = [(request.args[0], dict(request.args[1])) for request in requests]
    encoded = [
      self.tok_encode(context) or [self._prefix] for context, _ in asked
    ]
    found = {}
    with _progress("generate_until", len(asked), disable_tqdm) as bar:
      order = _longest_first(encoded, len)
      # All contexts in one call to `generate` must have the same options.
      order = sorted(order, key=lambda one: repr(asked[one[0]][1]))
      for _, group in itertools.groupby(order, lambda one: asked[one[0]][1]):
        for some in itertools.batched(group, self._batch):
          options = dict(asked[some[0][0]][1])
          texts = self._generate(
            [tokens for _, tokens in some], options, seed=some[0][0]
          )
          for (i, _), added in zip(some, texts, strict=True):
            found[i] = added
            self.cache_hook.add_partial("generate_until", asked[i], added)
          bar.update(len(some))
    return [found[i] for i in range(len(asked))]

  def _generate(
    self, contexts: Sequence[list[int]], options: dict[str, Any], seed: int
  ) -> list[str]:
    until = options.pop("until", None) or []
    until = tuple([until] if isinstance(until, str) else until)
    given = [options.pop(name, None) for name in _MOST_NAMES]
    most = next((x for x in given if x is not None), self.max_gen_toks)
    sampling = _sampling(options)
    if options:
      raise ValueError(
        "evaluate: a task may only set until, max_gen_toks, do_sample, "
        f"temperature, top_k and top_p, got {', '.join(map(str, options))}; "
        "leave the task out, or change a copy of it and pass --task-dir"
      )
    if most >= self.max_length:
      raise ValueError(
        f"evaluate: a task's max_gen_toks must be below {self.max_length}, the "
        f"number of tokens that the model reads at once, got {most}; pass a "
        "larger --length, or change a copy of the task and pass --task-dir"
      )
    kept = [tokens[-(self.max_length - most) :] for tokens in contexts]
    # Pad the last batch, so that no second program is compiled for it.
    rows = kept + kept[-1:] * (self._batch - len(kept))
    added = generate(
      self._model,
      rows,
      max_new_tokens=most,
      stop_tokens=self._stop_tokens(until),
      seed=seed,
      **sampling,
    )
    return [self._cut(tokens, until) for tokens in added.tokens[: len(kept)]]

  def _stop_tokens(self, until: tuple[str, ...]) -> tuple[int, ...]:
    """Lists the tokens that contain a stop string, and the stop tokens."""
    # A stop string of several tokens cannot stop generation. `_cut` later
    # removes it and all text after it.
    if until not in self._stops:
      ids = range(self._model.config.vocab_size)
      ends = [end for end in until if end]
      texts = ((i, self._text.decode([i])) for i in ids if ends)
      found = {i for i, text in texts if any(end in text for end in ends)}
      self._stops[until] = tuple(sorted(found.union(self._text.stop_tokens)))
    return self._stops[until]

  def _cut(self, tokens: list[int], until: Iterable[str]) -> str:
    """Decodes new tokens up to the first stop string."""
    if tokens and tokens[-1] in self._text.stop_tokens:
      tokens = tokens[:-1]
    text = self._text.decode(tokens)
    for end in until:
      text = text.split(end)[0] if end else text
    return text


def _sampling(options: dict[str, Any]) -> dict[str, Any]:
  """Moves a task's sampling options into arguments for `generate`."""
  temperature, top_k, top_p = (
    options.pop(name, None) for name in ("temperature", "top_k", "top_p")
  )
  if not options.pop("do_sample", bool(temperature)):
    return {}
  temperature = 1.0 if temperature is None else float(temperature)
  return {"temperature": temperature, "top_k": top_k, "top_p": top_p}


def _longest_first(items: Sequence, size: Any) -> list[tuple[int, Any]]:
  """Returns (index, item), largest first, so that memory runs out early."""
  return sorted(enumerate(items), key=lambda one: -size(one[1]))


def _progress(name: str, total: int, disable: bool) -> tqdm:
  return tqdm(desc=name, total=total, disable=disable, delay=2)
