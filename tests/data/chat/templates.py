# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Published chat templates, and edits that insert {% generation %} in them.

Each edit (old, new) replaces `old` by `new`. The inserted block contains
what the model writes after the generation prompt, including the token that ends
its turn.
"""

LLAMA3 = (
  "{% set loop_messages = messages %}{% for message in loop_messages %}{% set "
  "content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+"
  " message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set "
  "content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if "
  "add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>"
  "\n\n' }}{% endif %}"
)
LLAMA3_EDITS = [
  (
    "{{ content }}",
    "{% if message['role'] == 'assistant' %}"
    "{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}"
    "{% endgeneration %}{% else %}{{ content }}{% endif %}",
  )
]

LLAMA2 = (
  "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] "
  "%}{% set system_message = messages[0]['content'] %}{% else %}{% set "
  "loop_messages = messages %}{% set system_message = false %}{% endif %}{% for "
  "message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 "
  "% 2 == 0) %}{{ raise_exception('Conversation roles must alternate "
  "user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 and "
  "system_message != false %}{% set content = '<<SYS>>\\n' + system_message + "
  "'\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = "
  "message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ "
  "bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif "
  "message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token "
  "}}{% endif %}{% endfor %}"
)
LLAMA2_EDITS = [
  (
    "{{ ' '  + content.strip() + ' ' + eos_token }}",
    "{% generation %}{{ ' '  + content.strip() + ' ' + eos_token }}"
    "{% endgeneration %}",
  )
]

_TOOLS = (
  "# Tools\\n\\nYou may call one or more functions to assist with the user "
  "query.\\n\\nYou are provided with function signatures within "
  "<tools></tools> XML tags:\\n<tools>"
)
_CALLS = (
  "\\n</tools>\\n\\nFor each function call, return a json object with function "
  "name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n"
  '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n'
  "</tool_call><|im_end|>\\n"
)
_QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."

QWEN2_5 = (
  """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- '"""
  + _QWEN
  + """' }}
    {%- endif %}
    {{- "\\n\\n"""
  + _TOOLS
  + """" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- \""""
  + _CALLS
  + """" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\n"""
  + _QWEN
  + """<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not \
loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + \
'<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
)
QWEN2_5_EDITS = [
  (
    ' or (message.role == "assistant" and not message.tool_calls) %}',
    " %}",
  ),
  (
    """        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
""",
    """        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- generation %}
        {%- if message.content %}
            {{- message.content }}
        {%- endif %}
""",
  ),
  (
    """            {{- '\\n<tool_call>\\n{"name": "' }}
""",
    """            {%- if message.content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' }}
""",
  ),
  (
    """        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif""",
    """        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif""",
  ),
]

QWEN3 = (
  """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- \""""
  + _TOOLS
  + """" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- \""""
  + _CALLS
  + """" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, \
last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is \
string and not(message.content.startswith('<tool_response>') and \
message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not \
loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + \
'\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0]\
.rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + \
reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
)
QWEN3_EDITS = [
  (
    "        {%- if loop.index0 > ns.last_query_index %}\n",
    "        {{- '<|im_start|>' + message.role + '\\n' }}\n"
    "        {%- generation %}\n"
    "        {%- if loop.index0 > ns.last_query_index %}\n",
  ),
  (
    "{{- '<|im_start|>' + message.role + '\\n<think>\\n' +",
    "{{- '<think>\\n' +",
  ),
  (
    "                {{- '<|im_start|>' + message.role + '\\n' + content }}\n",
    "                {{- content }}\n",
  ),
  (
    "            {{- '<|im_start|>' + message.role + '\\n' + content }}\n",
    "            {{- content }}\n",
  ),
  (
    """        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif""",
    """        {%- endif %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif""",
  ),
]


def with_generation(template, edits):
  """Applies the edits, each of which must match exactly one place."""
  for old, new in edits:
    assert template.count(old) == 1, (template.count(old), old)
    template = template.replace(old, new)
  return template
