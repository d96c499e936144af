# SPDX-License-Identifier: Apache-2.0
"""Checks that pages that use U define it."""

import re

import pytest

from tests.docs.pages import LOGS, PAGES, ROOT


@pytest.mark.parametrize(
  "page", [*PAGES, *LOGS], ids=lambda page: str(page.relative_to(ROOT))
)
def test_page_that_uses_u_defines_it(page):
  text = page.read_text()
  if re.search(r"\d U\b", text):
    definition = re.search(
      r"\bU\W+(is|be) (the\s+size\s+of|one\s+BF16\s+copy)|U one BF16", text
    )
    assert definition, "define U: the size of a layer's input in BF16"
    assert "2 D bytes" in text[definition.start() :][:160].replace("\n", " ")
