# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back, and chat templates as transformers renders them."""

import json

import pytest
import tokenizers

from train.data.chat import ChatTemplate
from train.data.text import ByteText, TokenizerText, open_text
from train.data.tokens import DataConfig

WORDS = ["the", "cat", "<|endoftext|>", "<|im_end|>", "[UNK]", "<s>"]
SPECIAL = ["<|endoftext|>", "<|im_end|>", "<s>"]


@pytest.fixture
def folder(tmp_path):
  """A folder with a tokenizer.json of `WORDS`."""
  model = tokenizers.models.WordLevel(
    {word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"
  )
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  tokenizer.add_special_tokens(SPECIAL)
  # What is put in front of a text by default is not wanted.
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", WORDS.index("<s>"))]
  )
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  return tmp_path


def configure(folder, **config):
  (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_bytes_are_ids_and_others_no_text():
  text = ByteText()
  assert text.encode("é!") == [0xC3, 0xA9, 33]
  assert text.decode([0xC3, 0xA9, 33]) == "é!"
  # Half of a character, and ids that no byte has.
  replaced = "A{0}B{0}C".format("\N{REPLACEMENT CHARACTER}")
  assert text.decode([65, 0xC3, 66, 300, 67]) == replaced
  # An argument of a command that is not UTF-8.
  assert text.encode("\udcff") == [0xFF]


def test_tokenizer_adds_nothing_and_stops_at_the_end_of_a_text(folder):
  text = TokenizerText(str(folder / "tokenizer.json"))
  assert text.encode("the cat \udcff") == [0, 1, 4]
  assert text.decode([0, 1, 2]) == "the cat"
  assert text.stop_tokens == (2,)
  assert text.chat is None
  configure(folder, chat_template="x", eos_token="<|im_end|>")
  text = TokenizerText(str(folder / "tokenizer.json"))
  assert text.stop_tokens == (2, 3)


def test_text_is_that_of_the_runs_data(folder, tmp_path):
  path = str(folder / "tokenizer.json")
  assert isinstance(open_text(DataConfig(), None), ByteText)
  for data, given in (
    (DataConfig(path="x", tokenizer=path), None),
    (DataConfig(), path),
  ):
    assert open_text(data, given).encode("cat") == [1]
  ids = DataConfig(path="x", dtype="uint16")
  with pytest.raises(ValueError, match="got dtype uint16; pass --tokenizer"):
    open_text(ids, None)
  assert open_text(ids, path).encode("cat") == [1]


# As Llama 2, Qwen and Gemma write theirs, shortened.
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


def test_template_is_rendered_as_transformers_does(folder):
  configure(folder, chat_template=TEMPLATE, bos_token={"content": "<s>"})
  chat = ChatTemplate.load(folder)
  # Blocks leave no line; what they are indented by is no text.
  assert chat.render(" hello ") == "<s>[USER] hello\n[ASSISTANT]\n"
  # A file of its own comes before it.
  (folder / "chat_template.jinja").write_text("{{ {'a': 'é'} | tojson }}")
  assert ChatTemplate.load(folder).render("x") == '{"a": "é"}'


def test_default_is_chosen_of_several_templates(folder):
  named = [dict(name="rag", template="r"), dict(name="default", template="d")]
  configure(folder, chat_template=named)
  assert ChatTemplate.load(folder).render("x") == "d"
  configure(folder, chat_template=named[:1])
  assert ChatTemplate.load(folder) is None


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
def test_template_that_fails_is_a_sentence(source, reason):
  with pytest.raises(ValueError, match=f"^chat: .*({reason})"):
    ChatTemplate(source, {}).render("x")


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000])
def test_config_that_is_damaged_is_a_sentence(folder, content):
  (folder / "tokenizer_config.json").write_text(content)
  with pytest.raises(
    ValueError, match="^chat: .*tokenizer_config.json must be"
  ):
    ChatTemplate.load(folder)
