# SPDX-License-Identifier: Apache-2.0
"""Short answers are normalized before they are compared."""

import pytest

from train.evaluation.answers import is_match, is_short, normalized

TABLE = {
  "The Cat.": "cat",
  "  a\tred\nball ": "red ball",
  "an apple, a pear": "apple pear",
  "1,000": "1000",
  "3.5 m.": "3.5 m",
  "two dogs": "2 dogs",
  "None": "0",
  "T-shirt": "t shirt",
  "red/blue": "red blue",
  "yes!": "yes",
  "(left) side": "left side",
  "Don't": "dont",
  "New York, NY": "new york ny",
  "the": "",
  "": "",
  "\u00dcber": "\u00fcber",
}


@pytest.mark.parametrize("answer, form", TABLE.items())
def test_answers_match_if_their_normalized_forms_do(answer, form):
  assert normalized(answer) == form
  assert is_match(answer, form.upper())


def test_short_references_have_one_to_five_words_not_counting_articles():
  assert is_short("on the left side of it.") and is_short("Two.")
  assert not is_short("it is on the left side now") and not is_short("the.")
