# SPDX-License-Identifier: Apache-2.0
"""Conversations as documents, packed rows, and batches of rows."""

import json
import re
from pathlib import Path

import grain
import numpy as np
import pytest

from train.data.batches import (
  held_out_batches,
  read_ahead,
  train_batches,
)
from train.data.chat.documents import Counts, Documents, load_documents
from train.data.chat.encoder import ChatEncoder
from train.data.chat.formats import Completion
from train.data.chat.packing import pack
from train.data.chat.template import ChatTemplate

LLAMA3 = Path(__file__).parents[1] / "data" / "chat" / "llama3"
SEQ = 31


def make(lengths):
  """Makes documents of distinct tokens; all but their first are targets."""
  starts = np.cumsum([0, *lengths])
  mask = np.ones(starts[-1], bool)
  mask[starts[:-1]] = False
  tokens = np.arange(starts[-1], dtype=np.int32) + 1000
  return Documents(tokens, mask, starts, Counts())


LENGTHS = np.random.default_rng(5).integers(2, SEQ + 2, 100).tolist()


def rows_of(lengths=LENGTHS, is_packed=True, seed=0):
  documents = make(lengths)
  numbers = np.arange(len(documents))
  return pack(documents, numbers, seq=SEQ, seed=seed, is_packed=is_packed)


@pytest.mark.parametrize("is_packed", [True, False])
def test_rows_hold_each_document_once(is_packed):
  rows = rows_of(is_packed=is_packed)
  documents = rows.documents
  found = []
  for i in range(len(rows)):
    row = rows.read(i)
    assert {key: x.dtype for key, x in row.items()} == {
      "tokens": np.int32,
      "segments": np.int32,
      "is_target": bool,
    }
    assert all(x.shape == (SEQ + 1,) for x in row.values())
    segments = row["segments"]
    count = segments.max()
    assert is_packed or count == 1
    # Segments are 1, 2, ... in order, followed by padding.
    used = segments[segments > 0]
    np.testing.assert_array_equal(used, segments[: len(used)])
    np.testing.assert_array_equal(np.unique(used), np.arange(1, count + 1))
    assert (np.diff(used) >= 0).all()
    assert not row["is_target"][segments == 0].any()
    assert not row["tokens"][segments == 0].any()
    for segment in range(1, count + 1):
      tokens = row["tokens"][segments == segment]
      found.append(tokens.tolist())
      # A document's first token is never a target: nothing predicts it.
      mask = row["is_target"][segments == segment]
      assert not mask[0] and mask[1:].all()
  starts = documents.starts
  whole = [
    documents.tokens[start:end].tolist()
    for start, end in zip(starts[:-1], starts[1:], strict=True)
  ]
  assert sorted(found) == whole


def test_packing_leaves_little_padding_and_depends_only_on_the_seed():
  rows = rows_of()
  least = -(-sum(LENGTHS) // (SEQ + 1))
  assert least <= len(rows) <= least + 2
  assert rows.filled == sum(LENGTHS) / (len(rows) * (SEQ + 1)) > 0.95
  assert rows_of().members == rows.members
  assert rows_of(seed=1).members != rows.members
  # Documents may fill a row to its last token.
  assert len(rows_of([SEQ, 1, SEQ - 4, 5])) == 2
  with pytest.raises(ValueError, match=f"at most {SEQ} . 1 tokens, got 40"):
    rows_of([40])


def number_rows(rows, batch):
  """Returns the numbers of a batch's rows, found by their first tokens."""
  firsts = {rows.read(i)["tokens"][0]: i for i in range(len(rows))}
  return [firsts[x] for x in batch["tokens"][:, 0]]


def test_each_epoch_visits_all_rows_once_in_a_new_order():
  rows = rows_of(is_packed=False)
  batches = train_batches(rows, batch_size=7, seed=3)
  seen = [number_rows(rows, batches[i]) for i in range(43)]
  seen = np.concatenate(seen)[:300].reshape(3, 100)
  for epoch in seen:
    assert sorted(epoch) == list(range(100))
  assert not (seen[0] == seen[1]).all() and not (seen[1] == seen[2]).all()
  other = number_rows(rows, train_batches(rows, batch_size=7, seed=4)[0])
  assert other != seen[0][:7].tolist()


def test_batches_depend_only_on_the_seed_and_the_step():
  batches = train_batches(rows_of(), batch_size=4, seed=3)
  iterator = iter(read_ahead(batches))
  for i in range(30):
    batch = next(iterator)
    again = batches[i]
    assert batch.keys() == again.keys() == {"tokens", "segments", "is_target"}
    for key, x in batch.items():
      np.testing.assert_array_equal(x, again[key])
    if i == 20:
      state = iterator.get_state()
  other = iter(read_ahead(train_batches(rows_of(), batch_size=4, seed=3)))
  assert isinstance(other, grain.DatasetIterator)
  other.set_state(state)
  np.testing.assert_array_equal(next(other)["tokens"], batches[21]["tokens"])


@pytest.mark.parametrize("make_batches", [train_batches, held_out_batches])
def test_processes_together_read_the_batches_of_one_process(make_batches):
  rows = rows_of()
  options = {"seed": 2} if make_batches is train_batches else {}
  whole = make_batches(rows, batch_size=8, **options)
  parts = [
    make_batches(
      rows, batch_size=8, process_index=i, process_count=4, **options
    )
    for i in range(4)
  ]
  for i in range(3):
    joined = np.concatenate([part[i]["segments"] for part in parts])
    np.testing.assert_array_equal(joined, whole[i]["segments"])
  with pytest.raises(ValueError, match="positive multiple of 3, the number of"):
    make_batches(rows, batch_size=8, process_count=3, **options)


def test_evaluation_reads_every_row_or_max_batches():
  rows = rows_of(is_packed=False)
  batches = list(held_out_batches(rows, batch_size=8))
  assert len(batches) == 13
  last = batches[-1]["segments"]
  assert (last[:4, 0] == 1).all() and not last[4:].any()
  learned = sum(int(batch["is_target"].sum()) for batch in batches)
  assert learned == rows.documents.mask.sum()
  few = list(held_out_batches(rows, batch_size=8, max_batches=2))
  seen = np.concatenate([number_rows(rows, batch) for batch in few])
  np.testing.assert_array_equal(seen, np.arange(16) * 100 // 16)
  with pytest.raises(ValueError, match="max_batches must be at least 1, got 0"):
    held_out_batches(rows, batch_size=8, max_batches=0)
  with pytest.raises(ValueError, match="at least 101 rows, .* got 100"):
    train_batches(rows, batch_size=101, seed=0)
  with pytest.raises(ValueError, match="seed must be at least 0"):
    train_batches(rows, batch_size=1, seed=-1)


def test_seed_determines_held_out_documents():
  documents = make(LENGTHS)
  train, held_out = documents.split(0.07, seed=1)
  assert len(held_out) == 7
  both = np.sort(np.concatenate([train, held_out]))
  np.testing.assert_array_equal(both, np.arange(100))
  np.testing.assert_array_equal(documents.split(0.07, seed=1)[1], held_out)
  assert (documents.split(0.07, seed=2)[1] != held_out).any()
  assert [len(x) for x in make([2, 2]).split(0.01, seed=0)] == [1, 1]
  assert [len(x) for x in make([2, 2]).split(0.99, seed=0)] == [1, 1]
  with pytest.raises(ValueError, match="to hold out, got 1"):
    make([2]).split(0.5, seed=0)


def test_fingerprint_depends_on_tokens_masks_and_document_ends():
  documents = make([3, 4])
  assert documents.fingerprint == make([3, 4]).fingerprint
  others = [make([4, 3]), make([3, 5])]
  for i, array in enumerate((documents.tokens, documents.mask)):
    changed = array.copy()
    changed[2] = not changed[2] if i else 7
    arrays = [documents.tokens, documents.mask, documents.starts]
    arrays[i] = changed
    others.append(Documents(*arrays, Counts()))
  starts = np.array([0, 2, 7])
  others.append(Documents(documents.tokens, documents.mask, starts, Counts()))
  assert documents.fingerprint not in {x.fingerprint for x in others}


def encode(tmp_path, rows, seq):
  encoder = ChatEncoder(LLAMA3 / "tokenizer.json", ChatTemplate.load(LLAMA3))
  file = tmp_path / "a.jsonl"
  file.write_text("\n".join(map(json.dumps, rows)))
  return load_documents([str(file)], encoder, seq=seq, vocab_size=400)


def test_long_conversations_are_cut_after_a_turn_if_one_fits(tmp_path):
  def row(*contents):
    roles = ("user", "assistant")
    messages = [
      {"role": roles[i % 2], "content": x} for i, x in enumerate(contents)
    ]
    return {"messages": messages}

  rows = [row("0", "1", "2", "3" * 3), row("0", "4" * 90), row("5" * 90, "6")]
  whole = encode(tmp_path, rows, seq=200)
  longest = int(whole.lengths.max()) - 1
  assert whole.counts == Counts(rows=3, longest=longest)
  ends = np.flatnonzero(np.diff(whole.mask[: whole.starts[1]].astype(int)) < 0)
  first = int(ends[0]) + 1  # Tokens to the end of the first answer.
  assert whole.lengths[0] > first + 1
  for seq in (first - 1, whole.lengths[0] - 2):
    cut = encode(tmp_path, rows, seq=int(seq))
    # The first conversation ends with its first answer, the second is cut, and
    # the third is left out because its answer comes too late.
    assert cut.lengths.tolist() == [first, seq + 1]
    np.testing.assert_array_equal(cut.tokens[:first], whole.tokens[:first])
    part = whole.tokens[whole.starts[1] :][: seq + 1]
    np.testing.assert_array_equal(cut.tokens[first:], part)
    lost = whole.mask.sum() - cut.mask.sum()
    assert cut.counts == Counts(
      rows=3,
      without_target=1,
      truncated=2,
      lost_targets=lost,
      longest=longest,
    )
    assert "2 truncated and 1 left out" in cut.counts.describe()
    assert f"removes {lost} target tokens" in cut.counts.describe()
    assert f"sequences of {longest} tokens" in cut.counts.describe()
  # The row ends with the second answer and omits the question after it.
  asked = [row("0", "1", "2", "3", "7")]
  long = encode(tmp_path, asked, seq=200)
  end = int(np.flatnonzero(long.mask)[-1]) + 1
  assert long.lengths[0] > end
  assert encode(tmp_path, asked, seq=end - 1).lengths.tolist() == [end]
  fits = encode(tmp_path, rows, seq=int(whole.lengths[0]) - 1)
  assert fits.lengths[0] == whole.lengths[0]


def test_error_names_the_shortest_length_that_works(tmp_path):
  rows = [
    {"prompt": "What is " * count, "completion": "this?"} for count in (9, 6)
  ]
  with pytest.raises(ValueError, match="2 left out .*; pass --seq") as raised:
    encode(tmp_path, rows, seq=4)
  (least,) = re.findall(r"--seq (\d+) ", str(raised.value))
  (longest,) = re.findall(r"sequences of (\d+) ", str(raised.value))
  assert int(encode(tmp_path, rows, seq=int(least)).mask.sum()) == 1
  with pytest.raises(ValueError, match=f"pass --seq {least} "):
    encode(tmp_path, rows, seq=int(least) - 1)
  assert not encode(tmp_path, rows, seq=int(longest)).counts.truncated
  assert encode(tmp_path, rows, seq=int(longest) - 1).counts.truncated == 1


def test_plain_completions_get_the_tokenizers_first_and_last_tokens(tmp_path):
  rows = [
    {"prompt": "What is ", "completion": "this?"},
    {"prompt": "", "completion": "five<|eot_id|>"},
  ]
  documents = encode(tmp_path, rows, seq=64)
  encoder = ChatEncoder(LLAMA3 / "tokenizer.json", None)
  (ids, mask, _), _ = encoder.encode(
    [("What is this?", [(8, 13)], []), ("", [], [])]
  )
  end = documents.tokens[documents.starts[1] - 1]
  begin = documents.tokens[0]
  assert documents.tokens[: documents.starts[1]].tolist() == [begin, *ids, end]
  assert documents.mask[: documents.starts[1]].tolist() == [False, *mask, True]
  assert documents.tokens[-1] == end != documents.tokens[-2]
  assert documents.mask[documents.starts[1] :].tolist()[0] is False
  assert documents.mask[documents.starts[1] + 1 :].all()


def test_spaces_and_tokens_partly_in_an_answer_are_learned():
  encoder = ChatEncoder(LLAMA3 / "tokenizer.json", None)
  # The tokenizer's post-processor would report that spaces have no length.
  texts = [("a \n\n  b", [(1, 7)], []), ("x the", [(2, 5)], [])]
  for ids, mask, ends in encoder.encode(texts):
    assert len(ids) > 1 and not mask[0] and mask[1:].all()
    assert ends == [len(ids)]
  ((_, mask, _),) = encoder.encode([("a  b", [(1, 3)], [])])
  assert mask.tolist() == [False, True, True, False]


def test_first_token_of_a_document_is_never_learned():
  folder = LLAMA3.parent / "qwen2_5"  # This tokenizer adds no first token.
  encoder = ChatEncoder(folder / "tokenizer.json", None)
  rendered = encoder.render(Completion("", "five"))
  ((ids, mask, _),) = encoder.encode([rendered])
  assert len(ids) > 1 and not mask[0] and mask[1:].all()
