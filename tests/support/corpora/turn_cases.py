# ruff: noqa: E501
"""Chat templates in the forms that families publish, tools included, and each one's turns written by hand.

By hand, a control token stands in white brackets: ⟦<|im_end|>⟧ is one, <|im_end|> is text that spells it.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

from hacpo_mega.config import Prompting
from hacpo_mega.samples.tokenizers import TextCodec, load_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Computes a term.",
            "parameters": {"type": "object", "properties": {"term": {"type": "string"}}, "required": ["term"]},
        },
    }
]
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call00000", "type": "function", "function": {"name": "calculate", "arguments": {"term": "6*7"}}}]}  # fmt: skip

CHATML = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# The tokens of Qwen3's own template: thinking stays only behind the last question of the user.
QWEN3 = """{%- if tools %}{{- '<|im_start|>system\\n' }}{{- "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}{%- endif %}
{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{%- if m.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif m.role == 'assistant' %}{%- set content = m.content %}{%- set thought = m.reasoning_content or '' %}
{%- if '</think>' in content %}{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- set body = content %}{%- if loop.index0 > ns.last and (loop.last or thought) %}{%- set body = '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>assistant\\n' + body }}{%- for c in m.tool_calls or [] %}{%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# The tokens of Qwen3.5's own template: arguments are written bare, True and None as Python does.
QWEN35 = QWEN3[: QWEN3.index("{%- set ns")].partition("{{- '\\n' + (tool")[0].partition("You may call")[0] + (
    """You have access to the following functions:\\n\\n<tools>" }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- "\\n</tools>\\n\\nIf you choose to call a function ONLY reply in the following format with NO suffix:\\n\\n<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n<parameter=example_parameter_2>\\nThis is the value for the second parameter\\nthat can span\\nmultiple lines\\n</parameter>\\n</function>\\n</tool_call>\\n\\n<IMPORTANT>\\nReminder:\\n- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within <tool_call></tool_call> XML tags\\n- Required parameters MUST be specified\\n- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after\\n- If there is no function call available, answer the question like normal with your current knowledge and do not tell the user about function calls\\n</IMPORTANT><|im_end|>\\n" }}{%- endif %}"""
    + QWEN3[QWEN3.index("{%- set ns") - 1 : QWEN3.index("{{- '<tool_call>")].replace("m.content + '\\n</tool_r", "m.content | trim + '\\n</tool_r").replace(" and (loop.last or thought)", "").replace("not loop.first or content %}{{- '\\n' }}", "not loop.first %}{{- '\\n' }}{%- elif content %}{{- '\\n\\n' }}")
    + """{{- '<tool_call>\\n<function=' + c.function.name + '>\\n' }}{%- for key, value in c.function.arguments.items() %}{{- '<parameter=' + key + '>\\n' + (value | tojson if value is mapping or (value is sequence and value is not string) else value | string) + '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}"""
    + QWEN3[QWEN3.index("{{- '<|im_end|>\\n' }}\n{%- else"):].replace("assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n' }}{%- endif %}")
)  # fmt: skip
# Another head than Qwen3's, so no renderer has its tokens.
DROPS_THINKING = (
    QWEN3.replace("# Tools", "# Functions")
    .replace("<|im_start|>user", "<|im_start|>tool")
    .replace("'<|im_start|>' + m.role", "'<|im_start|>' + m.role + ':'")
)
LLAMA = """{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if loop.first %}{% for tool in tools or [] %}{{ tool | tojson }}

{% endfor %}{% endif %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
GEMMA = """{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""
# The schemas stand before the last message of the user: a further one moves them.
REORDERS = """{{ bos_token }}{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""
# Nothing closes an own turn: the header of the next message is its end.
GLM = """[gMASK]<sop>{% for m in messages %}{% if m.role == 'user' %}<|user|>
{{ m.content }}{% else %}<|assistant|>
{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

# With tools, whose results have a header of their own.
GLM_TOOLS = """[gMASK]<sop>{{ tools | tojson if tools }}{% for m in messages %}{% if m.role == 'user' %}<|user|>
{{ m.content }}{% elif m.role == 'tool' %}<|observation|>
{{ m.content }}{% else %}<|assistant|>
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

LLAMA3 = LLAMA.replace(
    "{{ bos_token }}",
    """{%- if messages[0].role != 'system' %}{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\n' }}{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}{{- 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n<|eot_id|>' }}{%- endif %}""",
).replace(
    "{% if loop.first %}{% for tool in tools or [] %}{{ tool | tojson }}\n\n",
    """{% if loop.first and tools %}Given the following functions, please respond with a JSON for a function call with its proper arguments that best answers the given prompt.

Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.Do not use variables.

{% for tool in tools %}{{ tool | tojson(indent=4) }}

""",
)
WORDS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
CONTROL = [
    *("<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "[gMASK]", "<sop>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<start_of_turn>", "<end_of_turn>"),
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "<|observation|>", "<|begin_of_text|>", "<|end_of_text|>", "<|python_tag|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
]
CORPUS = [
    "What is six times seven?\n\nIt is forty-two.\n",
    '{"name": "calculate", "arguments": {"term": "6*7"}}',
    "user assistant system tool model\n",
    "The answer, I think, is 42 and 7 more.\n\n",
] * 3


def said(close: str, user: str, tool: str, opens: str, between: str = "") -> Callable[..., str]:
    """Function that writes by hand what follows an own turn; `{}` in a form is the text, or the list of results."""

    def write(others: Sequence[dict[str, Any]], is_closed: bool) -> str:
        text = "" if is_closed else close
        answers = [m["content"] for m in others if m["role"] == "tool"]
        shown = [json.dumps(t, ensure_ascii=False) if "json" in tool else t for t in answers]
        form = tool.replace("json", "")
        results = [form.replace("{}", t).replace("{n}", f"call{n:05d}") for n, t in enumerate(shown)]
        users = [user.replace("{}", m["content"]) for m in others if m["role"] == "user"]
        body = [f"⟦<|im_start|>⟧{between}{''.join(results)}⟦<|im_end|>⟧\n"] if between and results else results
        return text + ("" if close == GLM_HEADER else behind(close)) + "".join([*body, *users]) + opens

    return write


def behind(close: str) -> str:
    """Text of a template between the end of a turn and the next message."""
    return "\n" if close in ("⟦<|im_end|>⟧", "⟦<end_of_turn>⟧") else ""


GLM_HEADER = "⟦<|user|>⟧"


@dataclass(frozen=True)
class TurnCase:
    """A template, its end of turns, what follows an own turn by hand, and an own turn that calls the tool."""

    template: str
    eos: str
    write: Callable[..., str]
    call: str | None = None
    kind: str = "template"
    rewrites: bool = False
    named: list[str] = field(default_factory=list)


CASES = {
    "chatml": TurnCase(CHATML, "<|im_end|>", said(
        "⟦<|im_end|>⟧", "⟦<|im_start|>⟧user\n{}⟦<|im_end|>⟧\n", "⟦<|im_start|>⟧user\n⟦<tool_response>⟧{}⟦</tool_response>⟧⟦<|im_end|>⟧\n",
        "⟦<|im_start|>⟧assistant\n"), '⟦<tool_call>⟧{"name": "calculate", "arguments": {"term": "6*7"}}⟦</tool_call>⟧'),
    "qwen3": TurnCase(QWEN3, "<|im_end|>", said(
        "⟦<|im_end|>⟧", "⟦<|im_start|>⟧user\n{}⟦<|im_end|>⟧\n", "\n⟦<tool_response>⟧\n{}\n⟦</tool_response>⟧", "⟦<|im_start|>⟧assistant\n", "user"),
        '⟦<tool_call>⟧\n{"name": "calculate", "arguments": {"term": "6*7"}}\n⟦</tool_call>⟧', "renderer qwen3", True),
    "drops thinking": TurnCase(DROPS_THINKING, "<|im_end|>", said(
        "⟦<|im_end|>⟧", "⟦<|im_start|>⟧user:\n{}⟦<|im_end|>⟧\n", "\n⟦<tool_response>⟧\n{}\n⟦</tool_response>⟧", "⟦<|im_start|>⟧assistant\n", "tool"),
        '⟦<tool_call>⟧\n{"name": "calculate", "arguments": {"term": "6*7"}}\n⟦</tool_call>⟧', "template", True),
    "llama": TurnCase(LLAMA, "<|eot_id|>", said(
        "⟦<|eot_id|>⟧", "⟦<|start_header_id|>⟧user⟦<|end_header_id|>⟧\n\n{}⟦<|eot_id|>⟧", "⟦<|start_header_id|>⟧ipython⟦<|end_header_id|>⟧\n\njson{}⟦<|eot_id|>⟧",
        "⟦<|start_header_id|>⟧assistant⟦<|end_header_id|>⟧\n\n"), '{"name": "calculate", "parameters": {"term": "6*7"}}', named=["<|eom_id|>"]),
    "gemma": TurnCase(GEMMA, "<end_of_turn>", said(
        "⟦<end_of_turn>⟧", "⟦<start_of_turn>⟧user\n{}⟦<end_of_turn>⟧\n", "", "⟦<start_of_turn>⟧model\n")),
    "mistral": TurnCase(MISTRAL, "</s>", said("⟦</s>⟧", "⟦[INST]⟧ {}⟦[/INST]⟧", "", "")),
    "re-orders tools": TurnCase(REORDERS, "</s>", said(
        "⟦</s>⟧", f"⟦[AVAILABLE_TOOLS]⟧ {json.dumps(TOOLS)}⟦[/AVAILABLE_TOOLS]⟧⟦[INST]⟧ {{}}⟦[/INST]⟧", '⟦[TOOL_RESULTS]⟧ {"content": json{}, "call_id": "{n}"}⟦[/TOOL_RESULTS]⟧', ""),
        '⟦[TOOL_CALLS]⟧ [{"name": "calculate", "arguments": {"term": "6*7"}, "id": "call00000"}]', rewrites=True),
    "glm": TurnCase(GLM, "<|user|>", said(GLM_HEADER, "\n{}", "", "⟦<|assistant|>⟧\n"), named=["<|endoftext|>"]),
}  # fmt: skip


class ByHand:
    """Tokens of a text in which control tokens stand in white brackets, with a tokenizer that knows none."""

    def __init__(self, folder: Path) -> None:
        """Trains a byte-level tokenizer, in which "\\n\\n" and " is" are tokens, on a few lines."""
        self.folder = folder
        self._plain = tokenizers.ByteLevelBPETokenizer()
        self._plain.train_from_iterator(CORPUS, vocab_size=340, show_progress=False)

    def codec(self, case: TurnCase, prompting: Prompting | None = None) -> TextCodec:
        """The codec of a folder with this template; every test with it encodes by the whole tokenizer."""
        whole = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(self._plain.to_str()))
        whole.add_special_tokens({"additional_special_tokens": CONTROL, "eos_token": case.eos, "bos_token": "<s>"})
        whole.add_tokens(WORDS)  # not special, as in Qwen's tokenizers
        whole.chat_template = case.template
        whole.save_pretrained(self.folder)
        ends = whole.convert_tokens_to_ids([case.eos, *case.named])
        (self.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        self._tokenizer = load_tokenizer(self.folder)
        return TextCodec(self._tokenizer, prompting or Prompting(chat_template=True))

    def ids(self, text: str) -> list[int]:
        """Ids of a text with its control tokens in brackets."""
        ids: list[int] = []
        for n, part in enumerate(re.split("⟦(.*?)⟧", text)):
            ids += (
                [self._tokenizer.convert_tokens_to_ids(part)] if n % 2 else self._plain.encode(part).ids if part else []
            )
        return ids
