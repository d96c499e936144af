# SPDX-License-Identifier: Apache-2.0
"""Whether a short answer is the expected one, as VQA v2 compares them.

Both answers are put into small letters; punctuation, articles and line ends are
taken out, and numbers up to ten are digits. In one thing it is simpler than
`vqaEval.py` of github.com/GT-Vision-Lab/VQA, which puts lost apostrophes back
by a list of contractions: here no apostrophe counts.
"""

import re

# Longer references are no short answers, which would hardly match.
SHORT_WORDS = 5
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_ARTICLES = {"a", "an", "the"}
_TENS = "zero one two three four five six seven eight nine ten".split()
_NUMBERS: dict[str, str] = {
  "none": "0",
  **{word: str(number) for number, word in enumerate(_TENS)},
}


def normalized(answer: str) -> str:
  """Puts an answer into the form that is compared.

  Args:
    answer: As it was written or generated.

  Returns:
    Its words with one space between them.
  """
  text = " ".join(answer.split())
  has_thousands = re.search(r"\d,\d", text) is not None
  out = text
  for mark in _PUNCTUATION:
    # Beside a space it is punctuation; else it is between two words.
    is_beside = f"{mark} " in text or f" {mark}" in text
    out = out.replace(mark, "" if is_beside or has_thousands else " ")
  # A full stop, but not a decimal point.
  out = re.sub(r"\.(?!\d)", "", out).lower()
  out = re.sub("['\N{RIGHT SINGLE QUOTATION MARK}]", "", out)
  words = (_NUMBERS.get(word, word) for word in out.split())
  return " ".join(word for word in words if word not in _ARTICLES)


def is_short(reference: str) -> bool:
  """Whether a reference is a short answer, of 1 to `SHORT_WORDS` words."""
  return 1 <= len(normalized(reference).split()) <= SHORT_WORDS


def is_match(answer: str, reference: str) -> bool:
  """Whether an answer is the reference, both `normalized`."""
  return normalized(answer) == normalized(reference)
