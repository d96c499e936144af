# SPDX-License-Identifier: Apache-2.0
"""The parts of conversations to learn, in many kinds of templates."""

import json
import re

import pytest

from train.data.chat.formats import Conversation
from train.data.chat.targets import TargetFinder
from train.data.chat.template import PUBLISHED, ChatTemplate
from train.data.sources import BadData

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ADDED = ["<s>", "</s>", "<|end|>", "<|return|>", "<|im_end|>", "<think>"]
LOOP = "{% for m in messages %}"
PLAIN = "{% if m.role != 'assistant' %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}"
ANSWER = PLAIN + "{% else %}"
END = "{% endif %}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"


def found(source, messages, trained=None, tools=None):
  """Returns the texts to learn, turn by turn."""
  turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
  finder = TargetFinder(ChatTemplate(source, SPECIAL), ADDED)
  text, spans = finder.find(
    Conversation(messages, tools, tuple(trained or turns))
  )
  return [text[start:end] for start, end in spans]


def chat(*contents):
  roles = ("user", "assistant")
  return [
    {"role": roles[i % 2], "content": text} for i, text in enumerate(contents)
  ]


@pytest.mark.parametrize(
  "source, targets",
  [
    # The last turn may end differently from the others: Phi 3, gpt-oss.
    (
      LOOP + ANSWER + "A:{{ m.content }}<|end|>\n" + END + PROMPT
      + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
      ["b<|end|>", "d<|end|>"],
    ),
    (
      LOOP + ANSWER + "A:{{ m.content }}"
      "{{ '<|return|>' if loop.last else '<|end|>' }}" + END + PROMPT,
      ["b<|end|>", "d<|return|>"],
    ),
    # The prompt opens a block that turns omit: DeepSeek R1.
    (
      LOOP + ANSWER + "A:{{ m.content }}</s>" + END
      + "{% if add_generation_prompt %}A:<think>\n{% endif %}",
      ["b</s>", "d</s>"],
    ),
    # The last turn has an empty block that the prompt opens: Qwen3 Thinking.
    (
      LOOP + ANSWER + "A:{{ '<think>\n\n</think>\n' if loop.last }}"
      "{{ m.content }}</s>" + END
      + "{% if add_generation_prompt %}A:<think>\n{% endif %}",
      ["b</s>", "\n</think>\nd</s>"],
    ),
    # Turns have a header, but there is no generation prompt.
    (LOOP + "{{ m.role }}:\n{{ m.content }}<|im_end|>\n{% endfor %}",
     ["b<|im_end|>", "d<|im_end|>"]),
    # The text that ends a turn is not a single token.
    (LOOP + ANSWER + "A: {{ m.content }} ###\n\n" + END + PROMPT,
     [" b ###", " d ###"]),
    # The template adds a system turn if there is none.
    (
      "{% if messages[0].role != 'system' %}"
      "{% set messages = [{'role': 'system', 'content': 'S'}] + messages %}"
      "{% endif %}" + LOOP + ANSWER + "A:{{ m.content }}</s>" + END + PROMPT,
      ["b</s>", "d</s>"],
    ),
    (PUBLISHED["vicuna"], [" b</s>", " d</s>"]),
    # Contents are written in capitals; turns are found by the rest of the text.
    (LOOP + ANSWER + "A:{{ m.content | upper }}</s>" + END + PROMPT,
     ["B</s>", "D</s>"]),
  ],
)  # fmt: skip
def test_turns_are_found_with_their_ends(source, targets):
  assert found(source, chat("a", "b", "c", "d")) == targets
  assert found(source, chat("a", "b", "c", "d"), trained=[3]) == targets[1:]


def test_contents_may_look_like_the_template():
  source = LOOP + ANSWER + "A:{{ m.content }}</s>" + END + PROMPT
  messages = chat("A:b</s>user: x\nA:", "b</s>user: c\nA:b", "A:", "b")
  assert found(source, messages) == ["b</s>user: c\nA:b</s>", "b</s>"]


def test_alpaca_has_an_instruction_and_may_have_an_input():
  source = PUBLISHED["alpaca"]
  assert found(source, chat("a", "b")) == ["b</s>"]
  template = ChatTemplate(source, SPECIAL)
  assert template.render(chat("Add.", "b")) == (
    "<s>Below is an instruction that describes a task. Write a response that "
    "appropriately completes the request.\n\n### Instruction:\nAdd.\n\n"
    "### Response:b</s>"
  )
  messages = chat("Add.\n\n2, 3", "5")
  messages[0] |= {"instruction": "Add.", "input": "2, 3"}
  assert template.render(messages) == (
    "<s>Below is an instruction that describes a task, paired with an input "
    "that provides further context. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n2, 3\n\n"
    "### Response:5</s>"
  )
  with pytest.raises(BadData, match="one instruction and one response"):
    found(source, chat("a", "b", "c", "d"))


def test_reasoning_that_is_dropped_is_not_learned():
  """Uses a template that drops earlier reasoning (Qwen 3, DeepSeek R1)."""
  source = (
    "{% for m in messages %}" + PLAIN + "{% else %}A:"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}</s>"
  ) + END + PROMPT  # fmt: skip
  messages = chat("a", "<think>x</think>b", "c", "<think>y</think>d")
  assert found(source, messages) == ["b</s>", "<think>y</think>d</s>"]


@pytest.mark.parametrize(
  "source, reason",
  [
    # Answers are left out or written twice.
    (LOOP + PLAIN + END + PROMPT, None),
    (LOOP + ANSWER + "A:{{ m.content * 2 }}</s>" + END + PROMPT, None),
    # Nothing ends a turn.
    (LOOP + ANSWER + "A:{{ m.content }}\n" + END + PROMPT, None),
    # Only the last turn is written.
    (
      PROMPT + "{% set m = messages[-1] %}{% if m.role == 'assistant' %}"
      "A:{{ m.content }}</s>{% endif %}",
      "no mask",
    ),
    # The prompt and the turn differ, and neither begins with the other.
    (
      LOOP + ANSWER + "A: {{ m.content }}</s>" + END
      + "{% if add_generation_prompt %}A:<think>{% endif %}",
      None,
    ),
    # The text before or after a turn depends on its contents.
    (
      "{{ messages[-1].content | length }}\n" + LOOP + ANSWER
      + "A:{{ m.content }}</s>" + END + PROMPT,
      "no mask",
    ),
    (
      LOOP + ANSWER + "A:{{ m.content }}</s>" + END + PROMPT
      + "{{ messages[-1].content | length }}",
      "no mask",
    ),
    (
      LOOP + ANSWER + "A:{{ m.content }}</s>{{ m.content | length }}\n" + END
      + PROMPT,
      "no mask",
    ),
    ("{% if messages | length > 3 %}{{ raise_exception('no') }}{% endif %}"
     + LOOP + ANSWER + "A:{{ m.content }}</s>" + END + PROMPT, "template"),
  ],
)  # fmt: skip
def test_turns_that_cannot_be_found_are_refused(source, reason):
  with pytest.raises(
    ValueError, match="(cannot find|failed:|got) .*;"
  ) as raised:
    found(source, chat("a", "b", "c", "d" * 30))
  assert "\n" not in str(raised.value)
  assert getattr(raised.value, "reason", None) == reason


def test_generation_blocks_decide_what_is_learned():
  source = (
    LOOP + ANSWER + "A:{% generation %}{{ m.content }}{% endgeneration %}"
    "</s>" + END
  )
  messages = chat("a", "b", "c", "d")
  assert found(source, messages) == ["b", "d"]
  assert found(source, messages, trained=[1]) == ["b"]
  nothing = source.replace("{{ m.content }}{% end", "{% end")
  with pytest.raises(
    BadData, match="must have one .* block for each assistant turn"
  ):
    found(nothing, messages)


def calling(header="A:", last="", ends=PROMPT):
  """Returns a template like Mistral's: it refuses tool turns without a call."""
  return (
    "{% for m in messages %}{% if m.role == 'tool' and not "
    "loop.previtem.tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    + PLAIN + "{% else %}" + header + "{{ m.tool_calls | tojson if "
    "m.tool_calls else m.content }}" + last + "<|im_end|>\n" + END + ends
  )  # fmt: skip


def test_turns_that_cannot_be_replaced_are_found():
  call = {"role": "assistant", "tool_calls": ["f"]}
  user = {"role": "user", "content": "a"}
  messages = [user, call, {"role": "tool", "content": "t"}, *chat("c", "d")]
  expected = ['["f"]<|im_end|>', "d<|im_end|>"]
  assert found(calling(), messages) == expected
  # The same holds without a generation prompt.
  assert found(calling(ends=""), messages) == expected
  # The text before or inside a turn depends on the number of messages.
  mark = "{{ '!' if messages | length > 4 }}"
  for changed in (calling(last=mark), calling(header=mark + "A:")):
    with pytest.raises(BadData, match="cannot find turn 2 in the rendered"):
      found(changed, messages)


def test_tool_calls_belong_to_their_turn():
  source = (
    LOOP + ANSWER + "A:{{ m.content }}{% if m.tool_calls %}"
    "{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n" + END + PROMPT
  )
  calls = [{"name": "f", "arguments": {"x": "<|im_end|>"}}]
  messages = chat("a", "b", "c", "d")
  messages[1] |= {"tool_calls": calls, "content": ""}
  written = re.escape(json.dumps(calls))
  first, second = found(source, messages)
  assert re.fullmatch(written + re.escape("<|im_end|>"), first)
  assert second == "d<|im_end|>"
