# SPDX-License-Identifier: Apache-2.0
"""The pages speak the field's language, and define U before they use it."""

import re

import pytest

from tests.docs.pages import LOG, NAMES, PAGES

# What is written here in place of the field's own words, and what they are.
PRIVATE = {
  r"at rest|resting|\brests?\b(?= in\b)": "stored",
  r"remember": "saved for the backward pass",
  r"hand(s|ed|ing)? over": "saved for the backward pass",
  r"carr(y|ies|ied) (it |them )?out": "runs on",
  r"norm[ _]again": "recompute",
  r"where (it|they|each|a leaf|an array) lies?\b": "how it is sharded",
  r"\blies? (as|like|on a mesh|where)": "is sharded like",
  r"whoever": "name the function",
  r"here to say": "unsupported",
  r"is told by|says it itself": "is inferred from",
}


@pytest.mark.parametrize("page", [*PAGES, LOG], ids=[*NAMES, "docs/LOG.md"])
def test_page_has_no_private_words(page):
  # Examples quote what programs print.
  text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
  found = {
    match[0]: instead
    for words, instead in PRIVATE.items()
    for match in re.finditer(words, text, re.IGNORECASE)
  }
  assert found == {}


@pytest.mark.parametrize("page", [*PAGES, LOG], ids=[*NAMES, "docs/LOG.md"])
def test_page_defines_u(page):
  text = page.read_text()
  if re.search(r"\d U\b", text):
    definition = re.search(r"\bU\W+(is|be) one BF16\s+copy|U one BF16", text)
    assert definition, "define U: one BF16 copy of a layer's input"
    assert "2 D bytes" in text[definition.start() :][:160].replace("\n", " ")
