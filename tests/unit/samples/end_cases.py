# ruff: noqa: E501
"""Chat templates in the forms that families publish, and with which token each of them ends an answer."""

GEMMA = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set prefix = messages[0]['content'] + '\n\n' -%}
{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else "") }}{{ message['content'] | trim }}{{ '<end_of_turn>\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
PHI = """{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + '<|end|>\n' }}
{%- elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '<|end|>\n' }}
{%- elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' + message['content'] + '<|end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""
GLM = """[gMASK]<sop>{% for m in messages %}{% if m.role == 'system' %}<|system|>
{{ m.content }}{% elif m.role == 'user' %}<|user|>
{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>
{{ m.content.split('</think>')[-1].strip() }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
GLM_THINKS = GLM.replace("<|assistant|>\n{{", "<|assistant|>\n<think></think>\n{{").replace("{% if add", "{%- if add")
LLAMA = """{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
QWEN = """{%- for message in messages %}{%- if message.role == 'user' %}{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
{%- elif loop.last %}{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' + message.content.split('</think>')[-1] }}
{{- '<|im_end|>\n' }}{%- else %}{{- '<|im_start|>assistant\n' + message.content.split('</think>')[-1] + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"""
DEEPSEEK = """{% for message in messages %}{% if message['role'] == 'user' %}{{ '<\uff5cUser\uff5c>' + message['content'] }}
{%- else %}{{ '<\uff5cAssistant\uff5c>' + message['content'] + '<\uff5cend\uff5c>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c><think>\n' }}{% endif %}"""
# Closes the last answer with one token, earlier ones with another.
RETURNING = """{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}
{%- if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
LAST_IS_USERS = (
    "{% if messages[-1].role != 'user' %}{{ raise_exception('the last message must be of user') }}{% endif %}"
)
ONE_TURN = "{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}"
BOS_EACH_TURN = (
    "{% for m in messages %}{% if m.role == 'user' %}<bos>Q: {% else %}A: {% endif %}{{ m.content }}\n{% endfor %}A: "
)
ANSWER_LOST = "{% for m in messages if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"

# name: template, eos_token, ends of generation_config.json, end of others' answers, and the one that the template adds
CASES = {
    "gemma": (GEMMA, "<eos>", ["<eos>", "<end_of_turn>"], "<end_of_turn>", None),
    "phi": (PHI, "<|endoftext|>", ["<|endoftext|>", "<|assistant|>", "<|end|>"], "<|end|>", None),
    "glm": (GLM, "<|endoftext|>", ["<|endoftext|>", "<|user|>", "<|observation|>"], "<|user|>", None),
    "glm that thinks": (GLM_THINKS, "<|endoftext|>", ["<|endoftext|>", "<|user|>"], "<|user|>", None),
    "glm, closed": (GLM + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}", "<|endoftext|>",
                    ["<|endoftext|>", "<|user|>"], "<|user|>", None),
    "llama": (LLAMA, "<|eot_id|>", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "<|eot_id|>", None),
    "llama, base's eos": (LLAMA, "<|end_of_text|>", ["<|end_of_text|>", "<|eot_id|>"], "<|eot_id|>", None),
    "qwen": (QWEN, "<|im_end|>", ["<|im_end|>", "<|endoftext|>"], "<|im_end|>", None),
    "qwen, base": (QWEN, "<|endoftext|>", ["<|endoftext|>"], "<|im_end|>", "<|im_end|>"),
    "nothing named": (CHATML, "<|endoftext|>", [], "<|im_end|>", "<|im_end|>"),
    "text before the end": (CHATML.replace("'<|im_end|>'", "'\n.\n<|im_end|>'"), "<|endoftext|>",
                            ["<|endoftext|>", "<|im_end|>"], "<|im_end|>", None),
    "two tokens": (CHATML.replace("<|im_end|>", "<|im_end|><|endoftext|>"), "<|endoftext|>",
                   ["<|endoftext|>", "<|im_end|>"], "<|im_end|>", None),
    "two tokens, one named": (CHATML.replace("<|im_end|>", "<|im_end|><|endoftext|>"), "<|endoftext|>",
                              ["<|endoftext|>"], "<|im_end|>", "<|im_end|>"),
    "mistral": (MISTRAL, "</s>", ["</s>"], "</s>", None),
    "deepseek": (DEEPSEEK, "<\uff5cend\uff5c>", ["<\uff5cend\uff5c>"], "<\uff5cend\uff5c>", None),
    "another for the last": (RETURNING, "<|endoftext|>", ["<|return|>", "<|endoftext|>"], "<|return|>", None),
    "last is the user's": (LAST_IS_USERS + CHATML, "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"], "<|im_end|>", None),
    "one turn": (ONE_TURN + CHATML, "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"], "<|im_end|>", None),
    "no control token": (PLAIN, "<eos>", ["<end_of_turn>", "<eos>"], "<eos>", None),
    "a beginning is no end": (BOS_EACH_TURN, "<eos>", ["<eos>"], "<eos>", None),
    "no answer in it": (ANSWER_LOST, "<eos>", ["<eos>"], "<eos>", None),
    "no template": (None, "<eos>", ["<end_of_turn>", "<eos>"], "<eos>", None),
    "no template, another eos_token": (None, "<eos>", ["<|im_end|>", "<end_of_turn>"], "<|im_end|>", None),
}  # fmt: skip
