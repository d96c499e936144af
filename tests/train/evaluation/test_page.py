# SPDX-License-Identifier: Apache-2.0
"""The page of answers: one file in which all texts are escaped."""

import base64
import html.parser
import io

import pytest
from PIL import Image

from train.evaluation.answers import Answer, Answers
from train.evaluation.page import render

BAD = "<script>alert(1)</script> & \"x' </td>"


class Reader(html.parser.HTMLParser):
  """Collects elements with their attributes, and the text of each cell."""

  def __init__(self, page):
    super().__init__()
    self.elements, self.cells, self.is_in = [], [], False
    self.feed(page)

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))
    if tag in ("td", "th"):
      self.cells.append("")
      self.is_in = True

  def handle_endtag(self, tag):
    self.is_in = self.is_in and tag not in ("td", "th")

  def handle_data(self, data):
    if self.is_in:
      self.cells[-1] += data

  def all(self, tag, key):
    return [x[key] for name, x in self.elements if name == tag and key in x]


def answers(*rows):
  return Answers(2, 8, 4.0, 0, [Answer(*row) for row in rows])


@pytest.fixture
def files(tmp_path):
  names = ["a&b.png", 'c"d.png']
  for name, color in zip(names, ("red", "blue"), strict=True):
    Image.new("RGB", (900, 300), color).save(tmp_path / name)
  return tuple(tmp_path / name for name in names)


def test_page_escapes_all_texts_and_embeds_images(files):
  first = answers(
    (0, BAD, "Red.", "red", files[:1], True, True),
    (0, "And?", BAD, BAD + "1", files, False, False),
    (1, "Text?", "No", "yes", (), True, False),
  )
  page = render([(BAD, first)])
  read = Reader(page)
  tags = {tag for tag, _ in read.elements}
  assert not tags & {"script", "link", "iframe", "object"}
  assert "default-src 'none'" in read.all("meta", "content")[1]
  # The cells after the header, in reading order.
  assert read.cells[7:14] == [BAD, "2", "3", "0.5000", "1.6487", "2", "50.0%"]
  assert read.cells[14:26] == [
    *("question", "reference", BAD),
    *(BAD, "Red.", "red\N{CHECK MARK} match"),
    *("And?", BAD, BAD + "1"),
    *("question", "reference", BAD),
  ]
  assert read.cells[26:] == ["Text?", "No", "yes\N{MULTIPLICATION X} no match"]
  # Each image of a conversation is shown once, as a thumbnail.
  assert read.all("img", "alt") == [file.name for file in files]
  for source, color in zip(read.all("img", "src"), (0, 2), strict=True):
    kind, _, encoded = source.partition(",")
    assert kind == "data:image/jpeg;base64"
    image = Image.open(io.BytesIO(base64.b64decode(encoded)))
    assert image.size == (256, 85)
    assert image.getpixel((9, 9))[color] > 240
  # Conversations with a wrong short answer can be shown alone.
  assert read.all("section", "class") == ["same", "differs"]
  assert "short answer that does not match" in page


def test_answers_of_two_models_are_side_by_side():
  rows = [(i, "Q", "R", text, (), False, False) for i, text in enumerate("ab")]
  other = [rows[0], (*rows[1][:3], "c", *rows[1][4:])]
  page = render([("BF16", answers(*rows)), ("FP8", answers(*other))])
  read = Reader(page)
  assert read.cells[21:25] == ["question", "reference", "BF16", "FP8"]
  assert read.cells[-4:] == ["Q", "R", "b", "c"]
  assert read.all("section", "class") == ["same", "differs"]
  assert "Only conversations in which the answers differ" in page
  with pytest.raises(ValueError, match="their questions .2 and 1. or refer"):
    render([("BF16", answers(*rows)), ("FP8", answers(rows[0]))])
