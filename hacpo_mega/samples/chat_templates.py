"""A task inside the chat template of a tokenizer: a program that came with the model, and is held against probes.

Not here: which messages a prompt is made of (config/prompting.py), and their ids (tokenizers.py).
"""

import jinja2
from transformers import PreTrainedTokenizerBase

from hacpo_mega.config import Prompting
from hacpo_mega.config.chat_messages import tools_of
from hacpo_mega.config.prompting import TRIALS


def rendered(tokenizer: PreTrainedTokenizerBase, prompting: Prompting, text: str) -> str:
    """What the model reads for a task inside its tokenizer's chat template. ValueError where that refuses or fails."""
    given = {**prompting.template_kwargs, **({"tools": tools} if (tools := tools_of(text)) else {})}
    try:
        return tokenizer.apply_chat_template(
            prompting.messages(text), add_generation_prompt=True, tokenize=False, **given
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template of {tokenizer.name_or_path} refuses the prompt: {error}") from error
    except Exception as error:  # a template is a program: whatever it raises is its fault
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"the chat template of {tokenizer.name_or_path} fails with {what}") from error


def check_chat_template(tokenizer: PreTrainedTokenizerBase, prompting: Prompting) -> None:
    """ValueError for a tokenizer without a template, or with one that ignores in silence what it does not know."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"chat_template is on, but the tokenizer of {tokenizer.name_or_path} has none; "
            "switch it off for a base model, or add chat_template.jinja to the folder"
        )
    texts = [rendered(tokenizer, prompting, probe) for probe in TRIALS]
    if problem := prompting.template_problem(str(tokenizer.chat_template), texts):
        raise ValueError(f"the chat template of {tokenizer.name_or_path} {problem}")
