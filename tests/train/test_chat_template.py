# SPDX-License-Identifier: Apache-2.0
"""Chat templates, as transformers renders them."""

import dataclasses
import datetime
import json
import shutil

import pytest

from train.data.chat.documents import load_documents
from train.data.chat.encoder import ChatEncoder
from train.data.chat.template import PUBLISHED, ChatTemplate


def configure(tmp_path, **config):
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))


def prompt(template, text):
  messages = [{"role": "user", "content": text}]
  return template.render(messages, add_generation_prompt=True)


# A short template in the style of Llama 2, Qwen and Gemma.
TEMPLATE = """\
{% for message in messages %}
  {% if message['role'] == 'assistant' %}
    {% generation %}
{{ message['content'] }}
    {% endgeneration %}
    {% continue %}
  {% endif %}
{{ bos_token }}[{{ message.role | upper }}] {{ message['content'] | trim }}
{% endfor %}
{% if tools %}
{{ tools | tojson }}
{% endif %}
{% if add_generation_prompt %}
[ASSISTANT]
{% endif %}"""


def test_template_is_rendered_as_in_transformers(tmp_path):
  configure(tmp_path, chat_template=TEMPLATE, bos_token={"content": "<s>"})
  chat = ChatTemplate.load(tmp_path)
  # Block tags leave no empty lines and no indentation.
  assert prompt(chat, " hello ") == "<s>[USER] hello\n[ASSISTANT]\n"
  # chat_template.jinja has priority.
  (tmp_path / "chat_template.jinja").write_text("{{ {'a': 'é'} | tojson }}")
  assert prompt(ChatTemplate.load(tmp_path), "x") == '{"a": "é"}'


def test_default_template_is_chosen_among_several(tmp_path):
  named = [dict(name="rag", template="r"), dict(name="default", template="d")]
  configure(tmp_path, chat_template=named)
  assert prompt(ChatTemplate.load(tmp_path), "x") == "d"
  configure(tmp_path, chat_template=named[:1])
  assert ChatTemplate.load(tmp_path) is None


def test_tools_select_their_own_template(tmp_path):
  named = [
    dict(name="default", template="d"),
    dict(name="tool_use", template="{{ tools | tojson(indent=1) }}"),
  ]
  configure(tmp_path, chat_template=named)
  chat = ChatTemplate.load(tmp_path)
  assert chat.render([], tools=[]) == chat.render([]) == "d"
  assert chat.render([], tools=["é"]) == '[\n "é"\n]'


def test_special_tokens_are_also_read_from_older_files(tmp_path):
  configure(tmp_path, chat_template=PUBLISHED["vicuna"], eos_token=None)
  old = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
  (tmp_path / "special_tokens_map.json").write_text(json.dumps(old))
  chat = ChatTemplate.load(tmp_path)
  assert chat.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
  configure(tmp_path, eos_token="<|im_end|>")
  chat = ChatTemplate.load(tmp_path, "vicuna")
  assert chat.special_tokens["eos_token"] == "<|im_end|>"
  with pytest.raises(
    ValueError, match="^chat: a template is one of alpaca, chatml"
  ):
    ChatTemplate.load(tmp_path, "gpt")


def test_date_can_be_fixed():
  chat = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {})
  then = datetime.datetime(2024, 7, 26)
  assert dataclasses.replace(chat, now=then).render([]) == "26 Jul 2024"
  assert chat.render([]) == datetime.datetime.now().strftime("%d %b %Y")


def test_templates_get_messages_as_in_transformers():
  chat = ChatTemplate("{{ messages | tojson }}", {})
  given = [{"role": "assistant", "content": None, "reasoning": "so"}]
  shown = [
    {"thinking": "so", "role": "assistant", "reasoning": "so"}
    | {"reasoning_content": "so"}
  ]
  assert json.loads(chat.render(given)) == shown
  assert given[0].keys() == {"role", "content", "reasoning"}


def test_generation_marks_the_contents_of_its_blocks():
  chat = ChatTemplate(TEMPLATE, {})
  assert chat.has_generation(None)
  assert not ChatTemplate(PUBLISHED["llama3"], {}).has_generation(None)
  turns = [("user", "a"), ("assistant", "b é"), ("assistant", "c")]
  messages = [dict(role=role, content=text) for role, text in turns]
  text = chat.render(messages)
  spans = chat.generated(messages, None)
  assert [text[start:end] for start, end in spans] == ["b é\n", "c\n"]
  # If a template changed a block's text, all later positions would be wrong.
  source = "{% set x %}{% generation %}ab{% endgeneration %}{% endset %}"
  cut = ChatTemplate(source + "{{ x[1:] }}", {})
  with pytest.raises(ValueError, match="must write the text of each"):
    cut.generated(messages, None)


@pytest.mark.parametrize(
  "source, reason",
  [
    ("{{ raise_exception('no system role') }}", "no system role"),
    ("{% if %}", "Expected an expression"),
    ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
    ("{{ ''.__class__.__mro__ }}", "is unsafe|undefined"),
    ("{{ cycler.__init__.__globals__.os }}", "unsafe|undefined"),
    ("{{ 1 / 0 }}", "division by zero"),
    ("{{ nothing.at_all }}", "'nothing' is undefined"),
    ("{{ strftime_now(1) }}", "must be str"),
  ],
)
def test_template_that_fails_is_reported(source, reason):
  with pytest.raises(ValueError, match=f"^chat: .*({reason})"):
    prompt(ChatTemplate(source, {}), "x")


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000])
def test_damaged_tokenizer_config_is_reported(tmp_path, content):
  (tmp_path / "tokenizer_config.json").write_text(content)
  with pytest.raises(
    ValueError, match="tokenizer_config.json must hold a JSON object, got"
  ):
    ChatTemplate.load(tmp_path)


@pytest.mark.parametrize("skip_bad", [False, True])
def test_missing_special_token_is_not_a_bad_row(tmp_path, skip_bad):
  shutil.copy("tests/data/chat/llama3/tokenizer.json", tmp_path)
  configure(tmp_path, eos_token="<|eot_id|>")
  turns = [{"role": "user", "content": "a"}]
  turns.append({"role": "assistant", "content": "b"})
  file = tmp_path / "rows.jsonl"
  file.write_text(json.dumps({"messages": turns}))
  encoder = ChatEncoder(
    tmp_path / "tokenizer.json", ChatTemplate.load(tmp_path, "vicuna")
  )
  words = r"uses the tokenizer's bos_token, got none in tokenizer_config.json"
  with pytest.raises(ValueError, match=words) as raised:
    load_documents(
      [str(file)], encoder, seq=64, vocab_size=200_000, skip_bad=skip_bad
    )
  assert "correct the" not in str(raised.value)
