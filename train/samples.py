# SPDX-License-Identifier: Apache-2.0
"""Answers of a model in training to held-out prompts, for a person to look at.

At each evaluation the most probable token is taken, one after the other, until
the answer ends. samples.jsonl in the run's folder has a line for each: `step`,
`sample` (its number), `prompt`, `answer`, and `reference`, what the data have.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from coat_jax.models import VisionLanguageModel, generate
from train.data.text import Text
from train.run.metrics import MetricsLog

# Of a prompt's end, and of an answer, in what is printed.
_SHOWN = 160


class Prompt(NamedTuple):
  """A held-out prompt.

  Attributes:
    tokens: Up to where the assistant writes.
    reference: The tokens that it writes there in the data.
  """

  tokens: list[int]
  reference: list[int]


class HeldOutSamples:
  """Generates answers and writes them to a run's samples.jsonl."""

  def __init__(
    self,
    path: Path,
    prompts: Sequence[Prompt],
    text: Text,
    *,
    graph: nnx.GraphDef,
    mesh: Mesh | None,
    most: int,
    resumed_step: int,
  ):
    """Opens the file.

    Args:
      path: The file; made if it is not there.
      prompts: At least one.
      text: The tokenizer.
      graph: The model without its weights.
      mesh: Its devices, of one process, or None.
      most: Tokens of an answer.
      resumed_step: Lines of later steps are dropped.
    """
    self._prompts, self._text = prompts, text
    self._graph, self._mesh, self._most = graph, mesh, most
    ends = {prompt.reference[-1] for prompt in prompts}
    # That of a turn, where it is a token of its own.
    ends = {token for token in ends if not text.decode([token])}
    self._stops = sorted({*text.stop_tokens, *ends})
    self._log = MetricsLog(path, resumed_step=resumed_step)

  def write(self, step: int, params: Any) -> list[str]:
    """Generates with the parameters after a step.

    Args:
      step: Steps done.
      params: The state's, sharded over the mesh.

    Returns:
      Lines to print.
    """
    context = contextlib.nullcontext()
    if self._mesh is not None:
      context = jax.set_mesh(self._mesh)
    model = nnx.merge(self._graph, params)
    if isinstance(model, VisionLanguageModel):
      model = model.decoder  # Prompts are text.
    try:
      with context:
        found = generate(
          model,
          [prompt.tokens for prompt in self._prompts],
          max_new_tokens=self._most,
          stop_tokens=self._stops,
        )
    except ValueError as error:  # NaN, which may be of these prompts alone.
      return [f"  samples: {error}"]
    lines = []
    for i, (prompt, answer) in enumerate(
      zip(self._prompts, found.tokens, strict=True)
    ):
      texts = {
        "prompt": self._text.decode(prompt.tokens),
        "answer": self._text.decode(answer),
        "reference": self._text.decode(prompt.reference),
      }
      self._log.write(step=step, sample=i, **texts)
      asked = " ".join(texts["prompt"].split())[-_SHOWN:]
      answered = " ".join(texts["answer"].split())[:_SHOWN]
      lines.append(f"  sample {i}: {asked} => {answered}")
    return lines

  def close(self) -> None:
    """Closes the file."""
    self._log.close()
