# SPDX-License-Identifier: Apache-2.0
"""Measures how well a model predicts texts, answers prompts and solves tasks.

  python -m train.evaluate RUN --data wiki.test.tokens
  python -m train.evaluate Llama-3.2-1B --data "c4-validation.*.json.gz"
  python -m train.evaluate RUN --task arc_easy --task-dir tasks --out RUN.json
  python -m train.evaluate llava-1.5-7b-hf --conversations vqa.json \
    --images images --template vicuna --page answers.html

The first argument is a Hugging Face folder, or a run's folder, whose newest
checkpoint is read. The model runs on one device, in BF16 or f32, without FP8.
`train.evaluation.perplexity` explains how texts are scored. Tasks come from
lm-evaluation-harness (pip install '.[eval]'); the command downloads nothing.
Conversations may contain images if the model is a LLaVA. `--page` writes the
model's answers to a web page.
"""

import dataclasses
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from coat_jax.models import Decoder, ModelConfig
from coat_jax.models.ranges import Count, Range, check_fields
from train.command_line import read_options
from train.data.chat.documents import Documents as Conversations
from train.data.text import Text
from train.evaluation import page, report
from train.evaluation.answers import Answers, ask, read_conversations
from train.evaluation.documents import read_documents
from train.evaluation.perplexity import Documents, perplexity
from train.evaluation.tasks import Tasks
from train.options import Flag, read_path, shown
from train.run.exits import exit_status, say
from train.run.signals import Signals
from train.run.writing import check_out
from train.source import Compute, Source, decoder_of, open_source

_Repeated = UseAppendAction[tuple[str, ...]]
_Path = Annotated[str | None, shown("optional", metavar="PATH")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
  """Measures how well a model predicts texts, answers prompts and solves tasks.

  Attributes:
    model: Folder of a run, or a Hugging Face folder.
    data: A text to predict: a file, folder or glob. Files contain plain text or
      JSON lines with the key `text`, and may be compressed. Repeat the option
      for more texts.
    documents: `apart` evaluates each document alone; `joined` evaluates all
      documents as one text.
    stride: Number of tokens by which the windows over a long text advance. A
      smaller stride gives each token more context.
    task: A task of lm-evaluation-harness. Repeat the option for more tasks.
    task_dir: Folder with your own tasks; paths in the tasks are relative to
      this folder.
    shots: How many examples to put before each question.
    conversations: A file of conversations, in a format that `train.finetune`
      reads. The command measures how well the model predicts the answers in the
      file, and generates the model's answers. Repeat the option for more files.
    images: Folder that image names in conversations are relative to.
    template: Name of a published chat template to use.
    skip_bad: Skip rows that cannot be used, and print how many.
    max_tokens: Maximum number of tokens in an answer.
    beside: A second model that answers the same questions.
    page: An HTML file to write, with questions, images and answers.
    limit: Maximum number of documents per text, of examples per task, and of
      conversations.
    length: Maximum number of tokens that the model sees at a time.
    batch: How many sequences to process at once.
    tokenizer: A tokenizer.json to use.
    compute: The dtype to compute in.
    out: A JSON file to write, with all results, versions and options.
  """

  model: Annotated[Positional[str], arg(metavar="RUN_OR_DIR")]
  data: _Repeated = ()
  documents: Documents = "apart"
  stride: Annotated[Count | None, shown("default: --length")] = None
  task: _Repeated = ()
  task_dir: _Path = None
  shots: Annotated[
    Annotated[int, Range(0, 1000)] | None,
    shown("default: the task's own number"),
  ] = None
  conversations: _Repeated = ()
  images: Annotated[
    str | None, shown("default: the folder of the conversations")
  ] = None
  template: Annotated[str | None, shown("default: the tokenizer's own")] = None
  skip_bad: Flag = False
  max_tokens: Count = 64
  beside: _Path = None
  page: _Path = None
  limit: Annotated[Count | None, shown("default: no limit")] = None
  length: Annotated[
    Count | None, shown("default: the model's training length")
  ] = None
  batch: Count = 8
  tokenizer: Annotated[str | None, shown("default: the model's own")] = None
  compute: Annotated[
    Compute | None, shown("default: bfloat16, or what the run used")
  ] = None
  out: _Path = None

  def __post_init__(self):
    if not (self.data or self.task or self.conversations):
      raise ValueError(
        "evaluate: needs a text, a task or conversations, got none; pass "
        "--data, --task or --conversations"
      )
    check_fields(self)
    for needed, names in {
      "task": ("task_dir", "shots"),
      "data": ("stride", "documents"),
      "conversations": (
        "images",
        "template",
        "skip_bad",
        "max_tokens",
        "beside",
        "page",
      ),
    }.items():
      for name in names:
        is_set = getattr(self, name) != getattr(type(self), name)
        if is_set and not getattr(self, needed):
          raise ValueError(
            f"evaluate: --{name.replace('_', '-')} needs --{needed}; pass "
            f"--{needed} too, or leave this option out"
          )


def run(config: EvaluateConfig) -> dict[str, Any]:
  """Evaluates a model; prints tables, writes files, and returns the report."""
  out, written = (
    _path_of(option, getattr(config, option)) for option in ("out", "page")
  )
  if out and written and out.resolve() == written.resolve():
    raise ValueError(
      f"evaluate: --out and --page must be different files, got {out} and "
      f"{written}; pass another file as --page"
    )
  source = _open(config, config.model)
  for data in config.data:  # Find bad paths before weights are read.
    next(read_documents(data), None)
  tasks = None
  if config.task:
    folder = config.task_dir and read_path("task_dir", config.task_dir)
    tasks = Tasks(config.task, folder or None)
  asked = _read_conversations(config, source)
  model = source.load()
  decoder, length = decoder_of(model), source.length
  found: dict[str, Any] = {
    "model": source.name,
    "family": source.family,
    "compute": source.compute,
    "length": length,
    "arguments": dataclasses.asdict(config),
    "versions": report.versions(),
  }
  if config.data:
    found["texts"] = _predict_texts(config, source.text, decoder, length)
    print(report.text_table(found["texts"]))
  if tasks is not None:
    from train.evaluation.harness import DecoderLM  # Needs the `eval` extra.

    lm = DecoderLM(decoder, source.text, length=length, batch=config.batch)
    results = tasks.run(lm, shots=config.shots, limit=config.limit)
    del lm  # It holds the model, whose memory `--beside` needs.
    found["tasks"] = report.task_rows(results)
    print(report.task_table(found["tasks"]))
  columns = []
  if asked:
    found["conversations"] = []
    for each, documents in asked:
      if each is not source:
        del model, decoder  # Only one model is in memory at a time.
        model = decoder = each.load()
      answers, row = _ask(config, each, model, documents)
      columns.append((each.name, answers))
      found["conversations"].append(row)
    print(report.answer_table(columns))
  if out is not None:
    report.write(out, found)
  if written is not None:
    report.write_text(written, page.render(columns))
    say(f"{written}: {len(columns[0][1].answers)} answers")
  return found


def _path_of(option: str, path: str | None) -> Path | None:
  if path is None:
    return None
  check_out(f"evaluate: --{option}", read := read_path(option, path))
  return read


def _open(config: EvaluateConfig, folder: str) -> Source:
  path = read_path("model", folder)
  source = open_source(path, config.tokenizer, config.compute)
  return source._replace(length=config.length or source.length)


def _predict_texts(
  config: EvaluateConfig, text: Text, model: Decoder, length: int
) -> list[dict[str, Any]]:
  rows = []
  for data in config.data:
    started = time.monotonic()
    found = perplexity(
      model,
      text,
      itertools.islice(read_documents(data), config.limit),
      length=length,
      stride=config.stride,
      batch=config.batch,
      kind=config.documents,
    )
    seconds = time.monotonic() - started
    say(f"{data}: {found.tokens / seconds:,.0f} tokens/s")
    rows.append(report.text_row(data, config.documents, found, seconds))
  return rows


def _read_conversations(
  config: EvaluateConfig, source: Source
) -> list[tuple[Source, Conversations]]:
  """Reads the conversations for each model, with its tokenizer and template."""
  if not config.conversations:
    return []
  sources = [source]
  if config.beside is not None:
    sources.append(_open(config, config.beside))
  is_text = all(isinstance(each.config, ModelConfig) for each in sources)
  if config.images is not None and is_text:
    raise ValueError(
      "evaluate: --images applies to vision-language models, got a text-only "
      f"{source.family}; leave --images out"
    )
  images = config.images and read_path("images", config.images)

  def read(each: Source) -> Conversations:
    documents = read_conversations(
      each,
      list(config.conversations),
      length=each.length,
      tokenizer=config.tokenizer,
      template=config.template,
      skip_bad=config.skip_bad,
      images=images or None,
    )
    say(f"{each.name}: {documents.counts.describe()}")
    return documents

  return [(each, read(each)) for each in sources]


def _ask(
  config: EvaluateConfig, source: Source, model: Any, documents: Conversations
) -> tuple[Answers, dict[str, Any]]:
  """Asks a model; returns its answers, and a table row about them."""
  started = time.monotonic()
  found = ask(
    model,
    source.text,
    documents,
    length=source.length,
    max_tokens=config.max_tokens,
    batch=config.batch,
    limit=config.limit,
  )
  seconds = time.monotonic() - started
  say(
    f"{source.name}: {len(found.answers)} answers in {seconds:.1f} s; "
    f"{found.left_out} questions left out because no answer of "
    f"{config.max_tokens} tokens fits after them"
  )
  row = dict(model=source.name, family=source.family, compute=source.compute)
  return found, row | report.answer_row(found, seconds)


def main(arguments: Sequence[str] | None = None) -> int:
  with Signals():
    config = read_options(EvaluateConfig, "evaluate", arguments)
    return exit_status(
      lambda: run(config), smaller="lower --batch, --length or --max-tokens"
    )


if __name__ == "__main__":
  sys.exit(main())
