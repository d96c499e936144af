# SPDX-License-Identifier: Apache-2.0
"""Files of conversations in every format, and bad rows."""

import json
from pathlib import Path

import pytest

from train.data.chat.documents import load_documents
from train.data.chat.encoder import ChatEncoder
from train.data.chat.formats import (
  Completion,
  find_row_files,
  parse,
  read_rows,
)
from train.data.chat.template import ChatTemplate
from train.data.sources import BadData

LLAMA3 = Path(__file__).parents[1] / "data" / "chat" / "llama3"
ASKED = {"role": "user", "content": "What?"}
ANSWERED = {"role": "assistant", "content": "That."}
GOOD = {"messages": [ASKED, ANSWERED]}


@pytest.fixture(scope="module")
def encoder():
  template = ChatTemplate.load(LLAMA3)
  return ChatEncoder(LLAMA3 / "tokenizer.json", template)


def write(file, rows, array=False):
  """Writes rows as JSON; strings and bytes are written unchanged."""
  rows = [x if isinstance(x, str | bytes) else json.dumps(x) for x in rows]
  rows = [x.encode() if isinstance(x, str) else x for x in rows]
  content = b"[\n" + b",\n".join(rows) + b"]" if array else b"\n".join(rows)
  file.write_bytes(content)
  return file


def turns(row, format):
  found = parse(row, format)
  return [(x["role"], x["content"]) for x in found.messages]


def test_all_formats_give_the_same_conversation():
  system = {"role": "system", "content": "Be."}
  plain = [("system", "Be."), ("user", "What?"), ("assistant", "That.")]
  assert turns({"messages": [system, ASKED, ANSWERED]}, "messages") == plain
  parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "at?"}]
  asked = {"role": "user", "content": parts}
  assert turns({"messages": [system, asked, ANSWERED]}, "messages") == plain
  said = [
    {"from": "human", "value": "What?"},
    {"from": "gpt", "value": "That."},
  ]
  row = {"id": "x", "conversations": said, "system": "Be."}
  assert turns(row, "sharegpt") == plain
  assert parse(row, "sharegpt").trained == (2,)
  first = {"from": "system", "value": "Be."}
  row = {"conversations": [first, *said], "system": "Not."}
  assert turns(row, "sharegpt") == plain
  row = {"instruction": "Wh", "input": "at?", "output": "That."}
  assert turns(row, "alpaca") == [("user", "Wh\n\nat?"), plain[2]]
  assert parse(row, "alpaca").messages[0]["input"] == "at?"
  row = {"instruction": "What?", "input": "", "output": "That."}
  assert turns(row, "alpaca") == plain[1:]
  assert turns({**row, "input": None, "text": 1}, "alpaca") == plain[1:]
  row = {"prompt": "What?", "completion": " That."}
  assert parse(row, "prompt") == Completion("What?", " That.")


def test_toolbench_functions_become_tool_turns():
  said = ["Use f.", "\nWhat?\nBegin!\n", "\nAction: f", "", "\nAction: Finish"]
  roles = ["system", "user", "assistant", "function", "assistant"]
  pairs = zip(roles, said, strict=True)
  conversations = [{"from": role, "value": text} for role, text in pairs]
  row = {"id": "Step 9: x", "conversations": conversations}
  found = parse(row, "sharegpt")
  assert [x["role"] for x in found.messages] == [*roles[:3], "tool", roles[4]]
  assert [x["content"] for x in found.messages] == said
  assert found.trained == (2, 4)


def test_sharegpt_function_calls_become_assistant_turns():
  said = [("human", "a"), ("function_call", "f"), ("observation", "t")]
  said = [{"from": role, "value": x} for role, x in [*said, ("gpt", "b")]]
  found = parse({"conversations": said}, "sharegpt")
  roles = ["user", "assistant", "tool", "assistant"]
  assert [x["role"] for x in found.messages] == roles
  assert found.trained == (1, 3)


def test_json_texts_in_calls_and_tools_are_parsed():
  function = {"name": "f", "arguments": '{"x": 1}'}
  call = {"id": "1", "type": "function", "function": function}
  message = {"role": "assistant", "content": None, "tool_calls": [call]}
  tools = [{"type": "function", "function": {"name": "f"}}]
  row = {"messages": [ASKED, message], "tools": json.dumps(tools)}
  found = parse(row, "messages")
  assert found.messages[1]["tool_calls"] == [
    {**call, "function": {"name": "f", "arguments": {"x": 1}}}
  ]
  assert found.tools == tools
  assert parse({**GOOD, "tools": ""}, "messages").tools is None
  assert function["arguments"] == '{"x": 1}'


def test_turns_of_weight_zero_are_not_learned():
  left_out = {**ANSWERED, "weight": 0}
  messages = [ASKED, left_out, ASKED, {**ANSWERED, "weight": 1}]
  found = parse({"messages": messages}, "messages")
  assert found.trained == (3,)
  assert "weight" not in found.messages[1]
  with pytest.raises(BadData, match="expected an assistant turn"):
    parse({"messages": [ASKED, left_out]}, "messages")


BAD = [
  (b'{"messages": ', "broken JSON", "the row is not JSON: expecting value"),
  (b'{"messages": [{"role"', "broken JSON", "at character 22"),
  (b'{"messages": "\xff"}', "not UTF-8", "byte 14 of the row is not UTF-8"),
  (b"[" * 100_000, "broken JSON", "the row is not JSON"),
  (
    {**GOOD, "image": "a.png"},
    "unexpected images",
    'has the key "image", but the model accepts only text',
  ),
  (
    {"text": "x"},
    "wrong format",
    "needs the keys messages, got the keys ..text",
  ),
  ([1], "wrong format", "expected a JSON object, got"),
  ({"messages": "x"}, "no turns", 'list of turns, got "x"'),
  ({"messages": []}, "no turns", "list of turns, got .."),
  ({"messages": ["x"]}, "wrong format", "expected an object as turn 1"),
  (
    {"messages": [ASKED, {"content": "x"}]},
    "missing role",
    "expected a role in turn 2, got the keys ..content",
  ),
  (
    {"messages": [ASKED, {"role": "robot", "content": "x"}]},
    "unknown role",
    'expected one of system, .* of turn 2, got "robot"',
  ),
  ({"messages": [ASKED, {**ANSWERED, "role": 1}]}, "unknown role", "got 1"),
  (
    {"messages": [{**ASKED, "content": " \n"}, ANSWERED]},
    "empty turn",
    r"turn 1 \(user\) is empty",
  ),
  (
    {"messages": [ASKED, {"role": "assistant"}]},
    "empty turn",
    r"turn 2 \(assistant\) is empty",
  ),
  (
    {"messages": [ASKED, {**ANSWERED, "content": None, "tool_calls": []}]},
    "empty turn",
    r"is empty .null content requires tool_calls.",
  ),
  ({"messages": [ASKED]}, "no assistant turn", 'with the roles ."user"'),
  ({"messages": [{**ASKED, "content": 1}, ANSWERED]}, "not text", "got 1"),
  (
    {"messages": [{**ASKED, "content": [{"type": "image"}]}, ANSWERED]},
    "not text",
    "expected text in turn 1",
  ),
  (
    {"messages": [ASKED, {**ANSWERED, "content": "\ud800"}]},
    "not text",
    "half of a surrogate pair",
  ),
  ({**GOOD, "tools": "{"}, "wrong format", "expected JSON as tools"),
  ({**GOOD, "tools": {"a": 1}}, "wrong format", "expected a list of tools"),
  (
    {"messages": [ASKED, {**ANSWERED, "tool_calls": ["f"]}]},
    "wrong format",
    "expected a list of objects as tool_calls of turn 2",
  ),
]


@pytest.mark.parametrize("row, reason, message", BAD)
def test_bad_row_is_reported_with_its_line(
  tmp_path, encoder, row, reason, message
):
  # The row is on line 17, because line 16 is blank.
  rows = [*[GOOD] * 15, "", row, GOOD]
  file = write(tmp_path / "data.jsonl", rows)
  sizes = dict(seq=64, vocab_size=400)
  with pytest.raises(ValueError, match=message) as raised:
    load_documents([str(file)], encoder, **sizes)
  text = str(raised.value)
  assert text.startswith(f"chat: {file} line 17: ") and "\n" not in text
  assert text.endswith(
    "; correct the row, or skip bad rows with skip_bad=True (on a command "
    "line --skip-bad)"
  )
  found = load_documents([str(file)], encoder, **sizes, skip_bad=True)
  assert len(found) == 16
  assert found.counts.bad == {reason: 1} and found.counts.rows == 17
  left_out = f"bad rows left out: 1 (1 {reason}, first at {file} line 17)"
  assert left_out in found.counts.describe()


def test_template_that_raises_is_a_bad_row(tmp_path):
  folder = LLAMA3.parent / "llama2"
  encoder = ChatEncoder(folder / "tokenizer.json", ChatTemplate.load(folder))
  file = write(tmp_path / "a.jsonl", [GOOD, {"messages": [ANSWERED, ASKED]}])
  with pytest.raises(ValueError, match="line 2: .*roles must alternate"):
    load_documents([str(file)], encoder, seq=64, vocab_size=400)
  found = load_documents(
    [str(file)], encoder, seq=64, vocab_size=400, skip_bad=True
  )
  assert found.counts.bad == {"template": 1} and len(found) == 1


def test_formats_of_json_lines_and_arrays_are_detected(tmp_path, encoder):
  lines = tmp_path / "a.jsonl"
  # A Unicode line separator does not end a line here.
  text = json.dumps(GOOD).replace("That.", "\u2028That.")
  write(lines, [b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), text + "\r"])
  said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
  rows = [json.dumps({"conversations": said}, indent=2)] * 2
  array = write(tmp_path / "b.json", rows, array=True)
  write(tmp_path / "c.txt", ["not looked at"])
  assert [row.line for row in read_rows(lines)] == [1, 2]
  # The first row is on lines 2 to 13.
  assert [row.line for row in read_rows(array)] == [2, 14]
  found = load_documents([str(tmp_path)], encoder, seq=64, vocab_size=400)
  assert len(found) == 4
  both = [str(array), str(tmp_path / "*.json*")]
  assert find_row_files(both) == [array, lines]
  # A given format applies to every file.
  with pytest.raises(
    ValueError, match="line 1: a row of format sharegpt needs"
  ):
    load_documents(
      [str(lines)], encoder, seq=64, vocab_size=400, format="sharegpt"
    )


@pytest.mark.parametrize(
  "content, line",
  [
    (b'[{"a": 1},\n{"b"}]', 2),
    (b"[1,\n2\n3]", 3),
    (b"[1,\n]", 2),
    (b"[1,\n2", 2),
    (b"[1]\nx", 2),
    (b"[1,\n\xff]", 2),
  ],
)
def test_damaged_array_is_reported_with_its_line(tmp_path, content, line):
  file = write(tmp_path / "a.json", [content])
  with pytest.raises(ValueError, match=f"^chat: .*a.json line {line}: "):
    list(read_rows(file))


def test_files_with_nothing_to_learn_are_reported(tmp_path, encoder):
  with pytest.raises(
    ValueError, match="^chat: expected files .* got none; .*--data"
  ):
    find_row_files([])
  with pytest.raises(
    FileNotFoundError, match="^chat: found no files of conversations at .*/x"
  ):
    find_row_files([str(tmp_path / "x")])
  file = write(tmp_path / "a.jsonl", ["", "{"])
  with pytest.raises(ValueError, match="bad rows left out: 1 .1 broken JSON"):
    load_documents([str(file)], encoder, seq=64, vocab_size=400, skip_bad=True)
  with pytest.raises(ValueError, match="below the vocabulary size 300, got"):
    load_documents([str(write(file, [GOOD]))], encoder, seq=64, vocab_size=300)


def test_conversations_need_a_template_and_completions_an_end_token(tmp_path):
  (tmp_path / "tokenizer.json").write_bytes(
    (LLAMA3 / "tokenizer.json").read_bytes()
  )
  encoder = ChatEncoder(tmp_path / "tokenizer.json", None)
  file = write(tmp_path / "a.jsonl", [GOOD])
  sizes = dict(seq=64, vocab_size=400, skip_bad=True)
  with pytest.raises(ValueError, match="must have a chat template, got none"):
    load_documents([str(file)], encoder, **sizes)
  write(file, [{"prompt": "a", "completion": "b"}])
  with pytest.raises(ValueError, match="ends with the tokenizer's eos_token"):
    load_documents([str(file)], encoder, **sizes)
