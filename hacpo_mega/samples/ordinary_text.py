"""Texts of others as ordinary text: no control token that they spell steers the model.

`<|im_end|>` in a tool's result would end a turn, for a chat template puts texts and control tokens into one string.
Elsewhere: prompts of the data, where a spelled control token is an error (tokenizers.py).
"""

import functools
import json
import re
import secrets
from collections.abc import Callable, Collection, Sequence

import tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hacpo_grading.texts.answer_text import CLOSES, OPENS


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


class OrdinaryText:
    """Encoder of texts in which control tokens of the template count, and those that others spelled do not.

    `hidden` puts a mark in the place of each control token that a text spells; the marks survive a template. `encode`
    restores the text behind them, and encodes it with the same tokenizer, in which control tokens have other names.
    Names and marks hold a random number, so no text can spell them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control_ids: Collection[int], template: str) -> None:
        """Control tokens are `control_ids`, those of thinking, and added ones in `template`, such as <tool_response>.

        ValueError for a tokenizer in Python, whose control tokens cannot be renamed.
        """
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ValueError(f"the tokenizer of {tokenizer.name_or_path} has no tokenizer.json: conversations need it")
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        steering = {token.content for number, token in added if number in control_ids}
        words = {token.content for _, token in added if token.content in template and token.content.strip()}
        thinking = {token.content for _, token in added if token.content in (OPENS, CLOSES)}
        self._texts = sorted(steering | words | thinking, key=lambda text: (-len(text), text))
        number = secrets.token_hex(8)
        self._names = {text: f"\ue002{number}:{n}\ue003" for n, text in enumerate(self._texts)}
        self._marks = {text: f"\ue000{number}:{n}\ue001" for n, text in enumerate(self._texts)}
        self._control, self._steering = map(_any_of, (self._texts, [t for t in self._texts if t in steering]))
        self._mark = re.compile(f"\ue000{number}:([0-9]+)\ue001")

    def hidden(self, text: str) -> str:
        """Text with marks for control tokens."""
        return self._control.sub(lambda found: self._marks[found[0]], text)

    def without_control(self, text: str) -> str:
        """The text without non-word control tokens, as `TextCodec.decode_answer` leaves them out."""
        return self._steering.sub("", text)

    def encode(self, text: str, usual: Callable[[str], Sequence[int]], *, begins: bool = False) -> list[int]:
        """Ids of a text with marks; of one without by `usual`. ValueError if a character has no token.

        `begins` adds what the tokenizer puts around every text, such as BOS.
        """
        if self._mark.search(text) is None:
            return list(usual(text))
        named = self._control.sub(lambda found: self._names[found[0]], text)
        restored = self._mark.sub(lambda found: self._texts[int(found[1])], named)
        try:
            return self._renamed.encode(restored, add_special_tokens=begins).ids
        except Exception as error:  # the Rust tokenizers raise a bare Exception
            raise ValueError(f"the tokenizer cannot encode a text of others: {error}") from error

    @functools.cached_property
    def _renamed(self) -> tokenizers.Tokenizer:
        content = json.loads(self._tokenizer.backend_tokenizer.to_str())
        content.update(truncation=None, padding=None)
        for token in content["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        model = content["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._names.get(piece, piece): number for piece, number in model["vocab"].items()}
        else:  # of Unigram: pieces with scores
            model["vocab"] = [[self._names.get(piece, piece), score] for piece, score in model["vocab"]]
        if isinstance(unknown := model.get("unk_token"), str):
            model["unk_token"] = self._names.get(unknown, unknown)
        return tokenizers.Tokenizer.from_str(json.dumps(content))
