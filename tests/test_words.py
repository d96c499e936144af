# SPDX-License-Identifier: Apache-2.0
"""Checks that code and pages use standard terms, not private ones."""

import re

import pytest

from tests.docs.pages import LOGS, PAGES, ROOT

# Maps patterns that must not occur to what to write instead.
PRIVATE = {
  r"at[ _]rest\b|\bresting|\brests\b": "stored",
  r"remember": "saved for the backward pass, save_residual",
  r"\bhand(s|ed|ing)?[ _]over": "saved for the backward pass",
  r"norm[ _]again": "recompute_norm",
  r"run_on_parts": "run_on_shards",
  r"\blies?\b": "is sharded like, is in",
  r"carr(y|ies|ied) (it |them )?out|who carries": "runs on",
  r"whoever|by whom": "name the function",
  r"\b(is|are) told by|says? it (itself|by itself)": "is inferred from",
  r"here to say": "unsupported: raises",
  r"\bspeaks\b": "is_primary",
  r'"""(Every one|All of it)\.': "what is returned",
}
# Keys of measured rows, which must keep their names.
STORED = r"remembered_units"
FOLDERS = ("coat_jax", "train", "benchmarks", "studies", "examples", "tests")
FILES = [
  *(p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))),
  *PAGES,
  *LOGS,
  ROOT / "CHANGELOG.md",
  ROOT / "Makefile",
]


def private_words(text: str) -> dict[str, str]:
  """Returns the private words in a text, and what to write instead."""
  # Leave out code blocks, because they may quote what programs print.
  text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
  text = re.sub(STORED, "", text)
  return {
    match[0]: instead
    for words, instead in PRIVATE.items()
    for match in re.finditer(words, text, re.IGNORECASE)
  }


def test_no_file_contains_private_words():
  found = {
    str(path.relative_to(ROOT)): words
    for path in FILES
    if path.name != "test_words.py"
    and (words := private_words(path.read_text()))
  }
  assert found == {}


@pytest.mark.parametrize(
  "text",
  [
    "moments at rest",
    "what it remembers",
    "def norm_again(",
    "the leaf lies on a mesh",
    "XLA carries it out",
    '  """All of it."""',
  ],
)
def test_private_word_is_found(text):
  assert private_words(text)


@pytest.mark.parametrize(
  "text", ["the rest of it", "remembered_units", "earliest", "is carried by"]
)
def test_other_words_are_allowed(text):
  assert not private_words(text)
