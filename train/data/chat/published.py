# SPDX-License-Identifier: Apache-2.0
"""Chat templates that came with known models, for tokenizers without one.

Text and spaces are those that the models were trained with:
  * llama3: meta-llama/Meta-Llama-3-8B-Instruct, tokenizer_config.json;
  * chatml: OpenAI's format as Qwen 1.5 and many others have it;
  * llama2: meta-llama/Llama-2-7b-chat-hf, tokenizer_config.json;
  * alpaca: the prompts of Stanford Alpaca's train.py, for one turn;
  * vicuna: `vicuna_v1.1` of FastChat's conversation.py.
"""

_LLAMA3 = (
  "{% set loop_messages = messages %}{% for message in loop_messages %}"
  "{% set content = '<|start_header_id|>' + message['role'] + "
  "'<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}"
  "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
  "{{ content }}{% endfor %}{% if add_generation_prompt %}"
  "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

_CHATML = (
  "{% for message in messages %}"
  "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
  "'<|im_end|>' + '\n'}}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_LLAMA2 = (
  "{% if messages[0]['role'] == 'system' %}"
  "{% set loop_messages = messages[1:] %}"
  "{% set system_message = messages[0]['content'] %}"
  "{% else %}{% set loop_messages = messages %}"
  "{% set system_message = false %}{% endif %}"
  "{% for message in loop_messages %}"
  "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
  "{{ raise_exception('Conversation roles must alternate "
  "user/assistant/user/assistant/...') }}{% endif %}"
  "{% if loop.index0 == 0 and system_message != false %}"
  "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + "
  "message['content'] %}"
  "{% else %}{% set content = message['content'] %}{% endif %}"
  "{% if message['role'] == 'user' %}"
  "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
  "{% elif message['role'] == 'assistant' %}"
  "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

# `input` is what a row in Alpaca's format has beside its instruction.
_ALPACA = """\
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 == 0) or loop.index0 > 1 %}
{{- raise_exception('Alpaca has one instruction and one response') }}
{%- elif message.role == 'user' and message.input %}
{{- bos_token + 'Below is an instruction that describes a task, paired with an '
'input that provides further context. Write a response that appropriately '
'completes the request.\\n\\n### Instruction:\\n' + message.instruction +
'\\n\\n### Input:\\n' + message.input + '\\n\\n### Response:' }}
{%- elif message.role == 'user' %}
{{- bos_token + 'Below is an instruction that describes a task. Write a '
'response that appropriately completes the request.\\n\\n### Instruction:\\n' +
message.content + '\\n\\n### Response:' }}
{%- else %}
{{- message.content + eos_token }}
{%- endif %}
{%- endfor %}"""

_VICUNA = """\
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}
{%- set turns = messages[1:] %}
{%- else %}
{%- set system = "A chat between a curious user and an artificial intelligence \
assistant. The assistant gives helpful, detailed, and polite answers to the \
user's questions." %}
{%- set turns = messages %}
{%- endif %}
{{- bos_token + system + ' ' }}
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Turns of user and assistant must alternate') }}
{%- elif message.role == 'user' %}
{{- 'USER: ' + message.content + ' ' }}
{%- else %}
{{- 'ASSISTANT: ' + message.content + eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- 'ASSISTANT:' }}
{%- endif %}"""

PUBLISHED = {
  "llama3": _LLAMA3,
  "chatml": _CHATML,
  "llama2": _LLAMA2,
  "alpaca": _ALPACA,
  "vicuna": _VICUNA,
}
