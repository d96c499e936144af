# SPDX-License-Identifier: Apache-2.0
"""Templates that run or grow without end are killed; others still render."""

import json
import os
import signal
from pathlib import Path

import pytest

from train.data.chat import rendering
from train.data.chat.documents import load_documents
from train.data.chat.encoder import ChatEncoder
from train.data.chat.rendering import TemplateLimit
from train.data.chat.template import ChatTemplate

TOKENIZER = Path(__file__).parents[1] / "data/chat/llama3/tokenizer.json"
SAID = [{"role": "user", "content": "é\udcff"}]
RANGES = "{% for i in range(99999) %}{% for j in range(99999) %}"
RANGES += "{% set x = j %}{% endfor %}{% endfor %}"


def render(source):
  return ChatTemplate(source, {}).render(SAID)


def assert_renders():
  assert render("{{ messages[0].content }}") == "é\udcff"


@pytest.mark.parametrize(
  "source, words",
  [
    (RANGES, "more than 1 seconds"),
    # A single expression, which Python's signal handlers cannot interrupt.
    ("{{ 10 ** (10 ** 10) }}", "more than 1 seconds"),
    ("{{ strftime_now('%Y' * 10 ** 9) }}", "more than 268435456 bytes"),
    ("{{ '%0999999999d' % 1 }}", "more than 268435456 bytes"),
    ("{{ [0] * 10 ** 12 }}", "more than 268435456 bytes"),
    ("{{ messages[0].content * 9 ** 7 }}", "9565938 characters, more than 10"),
  ],
)
def test_endless_templates_are_killed(source, words, monkeypatch):
  monkeypatch.setattr(rendering, "SECONDS", 1)
  monkeypatch.setattr(rendering, "MEMORY", 2**28)
  with pytest.raises(TemplateLimit, match=f"rendered no text: .*{words}"):
    render(source)
  assert_renders()


def test_a_killed_renderer_is_reported_and_restarted():
  assert_renders()
  rendering._RENDERER._process.kill()
  with pytest.raises(
    TemplateLimit, match=r"ended the Python process with exit status -9"
  ):
    assert_renders()
  assert_renders()


def test_recursion_is_an_error_in_the_template():
  source = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
  with pytest.raises(ValueError, match="recursion") as raised:
    render(source)
  assert not isinstance(raised.value, TemplateLimit)


def test_an_interrupted_answer_is_not_given_to_the_next_request(monkeypatch):
  def interrupted(file):
    raise KeyboardInterrupt

  with monkeypatch.context() as patched:
    patched.setattr(rendering.sandbox, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
      render("first")
  assert render("second") == "second"


def test_ctrl_c_does_not_end_the_renderer():
  assert_renders()
  process = rendering._RENDERER._process
  os.kill(process.pid, signal.SIGINT)
  assert_renders()
  assert rendering._RENDERER._process is process


def test_endless_template_is_an_error_even_if_bad_rows_are_skipped(
  tmp_path, monkeypatch
):
  row = {"messages": [*SAID, {"role": "assistant", "content": "a"}]}
  file = tmp_path / "rows.jsonl"
  file.write_text(f"{json.dumps(row)}\n" * 3)
  encoder = ChatEncoder(TOKENIZER, ChatTemplate("{{ [0] * 10 ** 12 }}", {}))
  with pytest.raises(TemplateLimit, match="rendered no text: .*; use another"):
    load_documents([str(file)], encoder, seq=9, vocab_size=400, skip_bad=True)
