# SPDX-License-Identifier: Apache-2.0
"""Makes this folder's files, with transformers 5.23.0 and tokenizers 0.23.3.

  pip install transformers tokenizers jinja2 numpy; python make_chat.py

Each model has a folder, which contains:

- a tokenizer of the model's kind with the model's special tokens, but trained
  here on a few lines
- the model's published chat template
- golden.json: conversations, their token ids from `apply_chat_template`, and
  the mask that `return_assistant_tokens_mask` returns after {% generation %}
  was inserted in the template
"""

import json
from pathlib import Path

from templates import (
  LLAMA2,
  LLAMA2_EDITS,
  LLAMA3,
  LLAMA3_EDITS,
  QWEN2_5,
  QWEN2_5_EDITS,
  QWEN3,
  QWEN3_EDITS,
  with_generation,
)
from tokenizers import (
  AddedToken,
  Regex,
  Tokenizer,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
  trainers,
)
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
TEXT = [
  "You are a helpful assistant. What is the weather in Paris today?",
  "The sum of two and three is five. Here is a list of the tools:",
  "I am happy to help you with that, and with this.",
  '{"name": "get_weather", "arguments": {"city": "Paris"}}',
] * 4
# The pattern of GPT-4's tokenizer, as Llama 3 and Qwen write it.
SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
  r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(special, plain=(), normalizer=None, trim_offsets=False):
  tokenizer = Tokenizer(models.BPE())
  if normalizer is not None:
    tokenizer.normalizer = normalizer
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(Regex(SPLIT), "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  trainer = trainers.BpeTrainer(
    vocab_size=320,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(TEXT, trainer)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
  tokenizer.add_special_tokens(list(special))
  tokenizer.add_tokens([AddedToken(x, normalized=False) for x in plain])
  return tokenizer


def llama3():
  special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>"]
  special += ["<|end_header_id|>", "<|eot_id|>"]
  tokenizer = byte_level(special, trim_offsets=True)
  bos = tokenizer.token_to_id(special[0])
  tokenizer.post_processor = processors.Sequence(
    [
      processors.ByteLevel(trim_offsets=True),
      processors.TemplateProcessing(
        single=f"{special[0]} $A", special_tokens=[(special[0], bos)]
      ),
    ]
  )
  return tokenizer, {"bos_token": special[0], "eos_token": "<|eot_id|>"}


def qwen():
  special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
  plain = ["<tool_call>", "</tool_call>", "<tool_response>"]
  plain += ["</tool_response>", "<think>", "</think>"]
  tokenizer = byte_level(special, plain, normalizers.NFC())
  return tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def llama2():
  """Makes one like sentencepiece's: "▁" for spaces, bytes for unknown text."""
  trained = Tokenizer(models.BPE())
  trained.pre_tokenizer = pre_tokenizers.Metaspace()
  trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
  trained.train_from_iterator(TEXT, trainer)
  model = json.loads(trained.to_str())["model"]
  pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
  vocab = {x: i for i, x in enumerate([*pieces, *model["vocab"]])}
  merges = [tuple(x) for x in model["merges"]]
  tokenizer = Tokenizer(
    models.BPE(
      vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
  )
  tokenizer.normalizer = normalizers.Sequence(
    [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
  )
  tokenizer.post_processor = processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", 1)]
  )
  tokenizer.add_special_tokens(
    [AddedToken(x, normalized=False) for x in pieces[:3]]
  )
  tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
  return tokenizer, tokens


def system(text):
  return {"role": "system", "content": text}


def user(text):
  return {"role": "user", "content": text}


def assistant(text, **more):
  return {"role": "assistant", "content": text, **more}


def tool(text):
  return {"role": "tool", "content": text}


def call(name, **arguments):
  return {
    "type": "function",
    "function": {"name": name, "arguments": arguments},
  }


HI = [user("What is the weather in Paris?"), assistant("I am happy to help.")]
MORE = [user("And today?"), assistant("The weather is 5.")]
CHATS = [
  HI,
  [system("You are a helpful assistant."), *HI],
  [system(""), *HI],
  [*HI, *MORE, user("a"), assistant("b")],
  [system("Sum."), *MORE, *HI, *HI],
  [user("  spaces \n"), assistant("\n  at both ends \t\n\n")],
  [
    user("Ça va, Zoë? cafe\u0301 日本語 🎉"),
    assistant("🎉 Très bien\u2028 — merci 👩‍👩‍👧‍👦é"),
    user("안녕"),
    assistant("한국어 e\u0301"),
  ],
  [user("x"), assistant("x"), user("x"), assistant("x")],
  [
    user("if a < b:\n\treturn '{{ a }}'\r\n"),
    assistant("```py\nif a:\n    pass\n```\n\n| a | b |"),
    *MORE,
  ],
  [user("Say [/INST] and <</SYS>>"), assistant("[/INST] assistant\n\n user")],
  [user("42" * 40), assistant("the " * 60)],
]
ALONE = [
  [assistant("Who is there?"), *HI],
  [*HI, assistant("One more thing."), *MORE],
]
TOOLS = [
  {
    "type": "function",
    "function": {
      "name": "get_weather",
      "description": "Says the weather; é <b>.",
      "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
      },
    },
  }
]
PARIS = [call("get_weather", city="Paris é")]
WITH_TOOLS = [
  [
    user("The weather in Paris?"),
    assistant("", tool_calls=PARIS),
    tool('{"sky": "blue"}'),
    assistant("It is blue."),
  ],
  [
    system("Help."),
    user("The weather in two cities?"),
    assistant(
      "I will look.", tool_calls=[*PARIS, call("get_weather", city="")]
    ),
    tool("blue"),
    tool(""),
    assistant("It is blue."),
    *MORE,
  ],
  [
    user("Paris?"),
    {"role": "assistant", "tool_calls": PARIS},
    tool("blue"),
    assistant("Blue."),
    user("Still?"),
    {"role": "assistant", "tool_calls": PARIS},
    tool("red"),
    assistant("Red."),
  ],
]
THINKING = [
  [user("2+3?"), assistant("<think>\nFive.\n</think>\n\nIt is five.")],
  [
    user("2+3?"),
    assistant("<think>\nFive.\n</think>\n\nIt is five."),
    user("And 2+4?"),
    assistant("Six.", reasoning_content="\nOne more.\n"),
  ],
  [
    user("2+3?"),
    assistant("It is five.", reasoning_content="Five."),
    user("Paris?"),
    assistant("I look.", reasoning_content="Look.", tool_calls=PARIS),
    tool("blue"),
    assistant("Blue.", reasoning_content="So it is blue."),
  ],
  [
    user("Paris?"),
    assistant("", reasoning_content="Look.", tool_calls=PARIS),
    tool("blue"),
    assistant("Blue."),
    *MORE,
  ],
]
MODELS = {
  "llama3": (llama3, LLAMA3, LLAMA3_EDITS, ALONE),
  "qwen2_5": (qwen, QWEN2_5, QWEN2_5_EDITS, [*ALONE, *WITH_TOOLS]),
  "llama2": (llama2, LLAMA2, LLAMA2_EDITS, []),
  "qwen3": (qwen, QWEN3, QWEN3_EDITS, [*ALONE, *WITH_TOOLS, *THINKING]),
}


def main():
  for name, (make, template, edits, more) in MODELS.items():
    backend, special = make()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    marked = with_generation(template, edits)
    rows = []
    for messages in [*CHATS, *more]:
      has_tools = any(x["role"] == "tool" for x in messages)
      row = {"messages": messages, "tools": TOOLS if has_tools else None}
      plain, found = (
        tokenizer.apply_chat_template(
          messages,
          tools=row["tools"],
          chat_template=source,
          return_dict=True,
          return_assistant_tokens_mask=source is marked,
        )
        for source in (template, marked)
      )
      assert plain["input_ids"] == found["input_ids"], messages
      mask = "".join(map(str, found["assistant_masks"]))
      assert "1" in mask
      rows.append({**row, "ids": plain["input_ids"], "mask": mask})
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(backend.to_str(), "utf-8")
    config = json.dumps({**special, "chat_template": template}, indent=1)
    (folder / "tokenizer_config.json").write_text(config + "\n")
    lines = ",\n".join(json.dumps(x, separators=(",", ":")) for x in rows)
    (folder / "golden.json").write_text(f"[\n{lines}\n]\n")
    print(name, len(rows))


if __name__ == "__main__":
  main()
