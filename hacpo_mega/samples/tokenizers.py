"""Tokenizers: making a small one, loading one, comparing two by content, and encoding for a learner.

An answer that crosses agents is text, and must become tokens that FOLLOW a prompt. `tokenizer(text)` does not give
these: SentencePiece-style tokenizers (Llama 2, Phi-3) put a space marker before a text encoded by itself, and drop one
space when they decode a text by itself. `TextCodec` detects this by trying, and then encodes and decodes behind an
anchor that is cut off again. A chat template is a program of the model's: it is tried before it is used.

Elsewhere: which answers are re-encoded at all (learner_view.py), and the messages of a prompt
(config/tables/prompting.py).
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hacpo_grading.texts.chat_messages import contents, lost_message, messages_of, messages_text, tools_of
from hacpo_mega.config import AgentConfig, Prompting
from hacpo_mega.config.tables.prompting import TRIALS
from hacpo_mega.models.files.answer_ends import QUESTION, AnswerEnds, Chat, answer_ends, chats_with_answer, written_ends
from hacpo_mega.models.files.chat_template import environment, reads_clock, same_draws
from hacpo_mega.models.files.documents import one_line
from hacpo_mega.models.files.folder import named_ends, read_config
from hacpo_mega.models.files.tokenizer_files import CONTROL_SHAPE, is_complete, mapping_digest
from hacpo_mega.samples.ordinary_text import OrdinaryText

PAD, EOS = "<pad>", "<eos>"
PROBES = ("x", "1", "a")
ANCHORS = ("=", "\n", "a", "1")
PLAIN = {"add_special_tokens": False, "split_special_tokens": True}
NO_LIMIT = 2**62  # tokens
# Characters per allowed token of a long prompt that are encoded to see that it is too long; text has about 4.
CHARACTERS_OF_A_TOKEN = 16


def make_tokenizer(folder: Path, vocabulary: Sequence[str]) -> PreTrainedTokenizerFast:
    """Writes a Hugging Face tokenizer whose tokens are exactly `vocabulary`, matched longest first, and returns it.

    Ids: 0 pad, 1 eos, then the vocabulary in order, so its size is len(vocabulary) + 2. Nothing inserts a space. It is
    a word-level model behind a split by one alternation of all tokens, longest first. A regular expression takes the
    first alternative that matches, so this is longest match from the left, in linear time. WordPiece matches the same
    way but is quadratic and turns a whole text into one unknown token; BPE follows merge ranks and Unigram the best sum
    of scores, and neither is longest match.
    There is no unknown token: a text with another character is an error when it is encoded, never silently changed.
    ValueError for a token that is empty, repeated, or the pad or end token.
    """
    _check_vocabulary(vocabulary)
    ids = {token: i for i, token in enumerate((PAD, EOS, *vocabulary))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids))
    longest_first = "|".join(re.escape(token) for token in sorted(vocabulary, key=len, reverse=True))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(longest_first), behavior="isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    return load_tokenizer(folder)


def _check_vocabulary(vocabulary: Sequence[str]) -> None:
    repeated = sorted({token for token in vocabulary if vocabulary.count(token) > 1})
    reserved = sorted({"", PAD, EOS}.intersection(vocabulary))
    if not vocabulary or repeated or reserved:
        found = f"repeated {repeated}, reserved {reserved}" if vocabulary else "none at all"
        raise ValueError(f"a vocabulary needs different, non-empty tokens that are not {PAD} or {EOS}; found {found}")


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Tokenizer of a Hugging Face folder, from files alone. ValueError if there is none, or it has no EOS.

    A folder whose tokenizer.json is all there is (`is_complete`) is loaded from that alone: AutoTokenizer would put the
    pre-tokenizer of the model family or of the named class in its place, and lose every space, or every token of more
    than one character. Beside a tekken.json it would take a class of Mistral's without template and vocabulary.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"tokenizer folder {folder} does not exist; give a Hugging Face folder on this machine")
    try:
        if is_complete(Path(folder)):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True, mistral_format=False
            )
    except Exception as error:  # the Rust tokenizers raise a bare Exception, and transformers anything
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"no tokenizer could be loaded from {folder}: {first}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer in {folder} names no eos_token; answers could never end. Set it in its config."
        )
    tokenizer.model_max_length = NO_LIMIT  # it cuts nothing here, but transformers would warn of longer texts
    return tokenizer


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the mapping between text and ids: model, merges, added tokens, normalizer, pre-tokenizer, decoder.

    Equal for the same tokenizer in another folder, under another name or with another chat template. It leaves out the
    rule that adds BOS (prompts are always encoded by the learner itself) and the choice of end tokens: a base model
    and its instruct twin often differ in that alone, and learner_view replaces an end token that the learner does not
    have.
    """
    if tokenizer.is_fast:
        return mapping_digest(tokenizer.backend_tokenizer.to_str())
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
    kept = {"class": type(tokenizer).__name__, "model": tokenizer.get_vocab(), "added_tokens": added}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def control_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that are no text: every special one (bos, eos, pad, unk, ...) and added ones of CONTROL_SHAPE."""
    added = tokenizer.added_tokens_decoder.items()
    shaped = (i for i, token in added if token.special or CONTROL_SHAPE.fullmatch(token.content))
    return frozenset((*tokenizer.all_special_ids, *shaped))


class TextCodec:
    """Encoder of prompts and answers for one agent, and decoder of its answers.

    `ends` are the agent's end tokens, and `eos_id` the first of them, which is appended on encoding; `fingerprint` is
    the tokenizer's; `control_ids` are tokens that steer the model instead of being text. Prompts are cached, since
    every source's answers to a prompt need the same ids.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompting: Prompting = Prompting(),  # noqa: B008
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`tools` are schemas that the chat template shows in every prompt, after those of the task.

        ValueError if the tokenizer has no chat template, or one that ignores its input.
        """
        self.tokenizer, self.tools = tokenizer, tuple(tools)
        self.prompting = prompting = prompting.timed()
        if prompting.chat_template:
            self._check_template()
        self.ends = self._find_ends()
        self.eos_id: int = self.ends.ids[0]
        self.fingerprint = tokenizer_fingerprint(tokenizer)
        self.control_ids = control_ids(tokenizer) | frozenset(self.ends.ids)
        self._closing_ids = {*self.ends.ids, *self._appended_ids()}
        self._control_texts = tokenizer.convert_ids_to_tokens(sorted(self.control_ids))
        self._has_token_V = np.bincount(list(tokenizer.get_vocab().values())) > 0
        self._anchors = self._find_anchors() if self._marks_starts() else ()
        kept: dict[int, int] = {}  # one object for each id: long prompts would hold 35 bytes a token
        self._prompt_ids = functools.lru_cache(maxsize=8192)(
            lambda text, opening: tuple(kept.setdefault(i, i) for i in self._encode_prompt(text, opening))
        )
        self._opened = functools.lru_cache(maxsize=8192)(
            lambda text: prompting.opened_thinking(self._prompt_text(text), text)
        )

    @property
    def reads_clock(self) -> bool:
        """True if prompts are rendered by a template that reads a clock, which stands at `prompting.time`."""
        return self.prompting.chat_template and reads_clock(self._template)

    @property
    def added_end_line(self) -> str | None:
        """Log line on an end token that only the chat template names; None without one."""
        return self.ends.added_line(self.token_text)

    def token_text(self, number: int) -> str:
        """Name of a token, on one line."""
        return one_line(str(self.tokenizer.convert_ids_to_tokens(number)))

    def require_fit(self, vocab_size: int | None) -> None:
        """ValueError if the tokenizer has ids beyond the model's `vocab_size`; None skips the check."""
        if vocab_size is not None and len(self._has_token_V) > vocab_size:
            raise ValueError(
                f"the tokenizer of {self.tokenizer.name_or_path} has ids up to {len(self._has_token_V) - 1}, and the "
                f"model {vocab_size} tokens (vocab_size of config.json): it is another model's; copy the model's own"
            )

    def encode_prompt(self, text: str, opening: str = "") -> tuple[int, ...]:
        """Ids of a prompt for the model: with BOS if the tokenizer adds one, or inside the chat template.

        `opening` follows the task's text: in messages, that of the last one. Others wrote it, so it is ordinary text.

        With a chat template the text is one user message and the assistant's turn is opened; a text that spells out a
        control token is then refused, for it would end that turn. Without one, special tokens spelled out in a prompt
        are special tokens: a data file may contain a template of its own, and its BOS is not doubled.
        ValueError also if a character has no token, or there is no token from which to predict the answer's first one.
        """
        return self._prompt_ids(text, opening)

    def prompt_lengths(self, texts: Sequence[str], limit: int | None = None) -> list[int]:
        """Number of ids that `encode_prompt` gives for each text, in a quarter of the time. ValueError as there.

        With `limit`, a longer text may be reported as limit + 1: only the start of a very long text is encoded.
        """
        read = [self._prompt_text(text) for text in texts]
        is_long = [limit is not None and self._starts_beyond(text, limit) for text in read]
        some = [text for text, long in zip(read, is_long) if not long]
        try:
            ids = iter(self._ids_of_all(some, self._prompt_options))
        except Exception:  # the Rust tokenizers raise a bare Exception, and do not say for which text
            return [limit + 1 if long else len(self.encode_prompt(text)) for text, long in zip(texts, is_long)]
        return [limit + 1 if long else len(self._checked(text, next(ids))) for text, long in zip(texts, is_long)]

    def _ids_of_all(self, texts: Sequence[str], options: Mapping[str, bool], num_threads: int = 1) -> list[list[int]]:
        """Result of one call of the tokenizer for all texts, with its errors, in a quarter of the time.

        For a class that encodes in its own way, makes that call. The Rust tokenizers release the GIL meanwhile, so
        threads share the texts.
        """
        if not texts:
            return []
        rust = getattr(type(self.tokenizer), "_encode_plus", None) is PreTrainedTokenizerFast._encode_plus
        # The first text puts the Rust tokenizer in the state that the options ask for: no truncation, no padding.
        found = self.tokenizer(list(texts[:1] if rust else texts), **options).input_ids
        if not rust:
            return found
        encode = self.tokenizer.backend_tokenizer.encode_batch_fast
        fast = functools.partial(encode, add_special_tokens=options["add_special_tokens"])
        size = -(-len(texts) // (4 * num_threads))
        parts = [list(texts[start : start + size]) for start in range(0, len(texts), size)]
        with ThreadPoolExecutor(num_threads) as threads:
            return [encoding.ids for part in threads.map(fast, parts) for encoding in part]

    def _starts_beyond(self, read: str, limit: int) -> bool:
        """True if a prefix of a text has more than twice `limit` tokens: the whole text then has more than `limit`."""
        size = CHARACTERS_OF_A_TOKEN * limit
        while size < len(read):
            if len(self._encode(read[:size], **self._prompt_options)) > 2 * limit:
                return True
            size *= 4
        return False

    def shown_prompt(self, text: str, opening: str = "") -> str:
        """Text of a task as the model reads it: template, system prompt and special tokens included."""
        return self.tokenizer.decode(
            list(self.encode_prompt(text, opening)), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def opened_thinking(self, text: str) -> str:
        """Start of the thinking block that a prompt opens and its answer continues; empty if it opens none."""
        return self._opened(text)

    def opened_before(self, text: str, head: Sequence[int]) -> str:
        """Start of the thinking block that a turn in a conversation on the task `text` continues; empty without one.

        `head` are all tokens before the turn. A template may open thinking behind some turns alone; a prompt without a
        template opens it once.
        """
        if not (opened := self._opened(text)):
            return ""
        last = list(head[-len(opened.encode()) - 1 :])
        shown = self.tokenizer.decode(last, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return opened if shown.rstrip().endswith(opened.rstrip()) else ""

    def encode_answer(self, text: str, ended: bool) -> tuple[int, ...]:
        """Ids of an answer that follows a prompt, then `eos_id` if the answer ended by itself.

        Special tokens spelled out in the text stay text, if the tokenizer allows it: it matches added tokens that are
        not marked special, and some have a piece of that name; `control_ids` tells. `decode_answer` restores the text
        if the tokenizer can write it. ValueError if a character has no token.
        """
        end = (self.eos_id,) if ended else ()
        for anchor, anchor_ids in self._anchors:
            ids = self._plain_ids(anchor + text)
            # an answer that starts with more of the anchor may merge with it ("==" is one token): take the next anchor
            if ids[: len(anchor_ids)] == anchor_ids:
                return ids[len(anchor_ids) :] + end
        return self._plain_ids(text) + end

    def encode_answers(self, texts: Sequence[str], num_threads: int = 1) -> list[tuple[int, ...] | None]:
        """Batch of `encode_answer` for texts that have not ended, in so many threads; None where it raises."""
        (anchor, start), *_ = (*self._anchors, ("", ()))
        try:
            found = self._ids_of_all([anchor + text for text in texts], PLAIN, num_threads)
        except Exception:  # the Rust tokenizers raise a bare Exception, and do not say for which text
            found = [None] * len(texts)
        return [
            tuple(ids[len(start) :]) if text and ids and tuple(ids[: len(start)]) == start else self._answer_ids(text)
            for text, ids in zip(texts, found, strict=True)
        ]

    def decode_answer(self, ids: Sequence[int]) -> str:
        """Text of an answer's ids, without special tokens; the first space is kept, nothing is cleaned up."""
        if not self._anchors:
            return self._text(ids)
        anchor, anchor_ids = self._anchors[0]
        return self._text([*anchor_ids, *ids])[len(anchor) :]

    def pieces(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Text of every token by itself; the name of a control token, U+FFFD for half a character."""
        names = self.tokenizer.convert_ids_to_tokens(list(ids))
        return tuple(self.decode_answer([token]) or str(name) for token, name in zip(ids, names, strict=True))

    def shows(self, ids: np.ndarray) -> bool:
        """True if the text of ids [T] shows them all.

        Control tokens leave no trace in the text. Neither do ids without a token, which a model with more rows than its
        tokenizer has tokens may sample.
        """
        known = self._has_token_V.take(ids, mode="clip").all() and ids.max(initial=0) < len(self._has_token_V)
        return bool(known) and self.control_ids.isdisjoint(ids.tolist())

    @functools.cached_property
    def ordinary_text(self) -> OrdinaryText:
        """Encoder of texts that others say. ValueError as of OrdinaryText."""
        template = self._template if self.prompting.chat_template else ""
        return OrdinaryText(self.tokenizer, self.control_ids, template)

    def _encode_prompt(self, text: str, opening: str) -> tuple[int, ...]:
        if not opening:
            return self._checked(text, self.encode_rendered(self._prompt_text(text)))
        whole = with_opening(text, self.ordinary_text.hidden(opening))
        read, begins = self._prompt_text(whole), self._prompt_options["add_special_tokens"]
        return self._checked(whole, self.ordinary_text.encode(read, self.encode_rendered, begins=begins))

    def encode_rendered(self, read: str) -> list[int]:
        """Ids of a prompt's text that stands inside its template already. ValueError names characters without token."""
        try:
            return self._encode(read, **self._prompt_options)
        except ValueError as error:
            missing = [repr(character) for character in dict.fromkeys(read) if not self._has_tokens(character)]
            reason = f"; it has no token for {', '.join(missing[:8])}" if missing else ""
            raise ValueError(f"{error}{reason}") from error

    def _has_tokens(self, character: str) -> bool:
        try:
            return bool(self._encode(character, add_special_tokens=False) or character.isspace())
        except ValueError:
            return False

    def _prompt_text(self, text: str) -> str:
        """Text of a task inside the template of this agent."""
        if not self.prompting.chat_template:
            return self.prompting.without_template(text)
        for content in contents(text):
            self._refuse_control_texts(content)
        read = self._rendered_task(text)
        if lost := lost_message(text, read):
            raise ValueError(f"the chat template of {self.tokenizer.name_or_path} {lost}")
        return read

    @property
    def _template(self) -> str:
        """Text of the chat template; of several named ones, all."""
        found = self.tokenizer.chat_template
        return "\n".join(found.values()) if isinstance(found, dict) else str(found)

    def _rendered_task(self, text: str) -> str:
        """Text of a task inside the chat template. ValueError if the template refuses it or fails."""
        tools = [*tools_of(text), *self.tools]
        given = {**self.prompting.template_kwargs, **({"tools": tools} if tools else {})}
        return self.rendered_chat(self.prompting.messages(text), given, opens_answer=True)

    def rendered_chat(self, chat: Chat, given: Mapping[str, Any], *, opens_answer: bool) -> str:
        """Text of messages inside the chat template, with the arguments `given`.

        `opens_answer` adds the start of the assistant's turn. ValueError if the template refuses them or fails.
        """
        template = self._template
        try:
            with same_draws(template, chat):
                if reads_clock(template) and self.prompting.time is not None:
                    # transformers' own clock runs, and 5.24 lets a template have no function of the caller's
                    own = self.tokenizer.get_chat_template(tools=given.get("tools"))
                    given = {"tools": None, "documents": None, **self.tokenizer.special_tokens_map, **given}
                    made = environment(self.prompting.time).from_string(own)
                    return made.render(messages=chat, add_generation_prompt=opens_answer, **given)
                return self.tokenizer.apply_chat_template(
                    chat, add_generation_prompt=opens_answer, tokenize=False, **given
                )
        except Exception as error:  # a template is a program and can raise anything
            refuses = isinstance(error, jinja2.TemplateError)
            problem = f"refuses the prompt: {error}" if refuses else f"fails with {type(error).__name__}: {error}"
            raise ValueError(f"the chat template of {self.tokenizer.name_or_path} {problem}") from error

    def _check_template(self) -> None:
        """ValueError for a tokenizer without a template, or with one that silently ignores what it does not know."""
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"chat_template is on, but the tokenizer of {self.tokenizer.name_or_path} has none; "
                "switch it off for a base model, or add chat_template.jinja to the folder"
            )
        texts = [self._rendered_task(trial) for trial in TRIALS]
        if problem := self.prompting.template_problem(str(self.tokenizer.chat_template), texts):
            raise ValueError(f"the chat template of {self.tokenizer.name_or_path} {problem}")

    def _find_ends(self) -> AnswerEnds:
        """End tokens of answers, from the folder that the tokenizer was loaded from and, if used, the chat template."""
        tokenizer, written = self.tokenizer, ()
        folder = Path(tokenizer.name_or_path) if tokenizer.name_or_path else None
        if self.prompting.chat_template:
            steering = sorted({*control_ids(tokenizer), *(named_ends(folder)[1] if folder is not None else ())})
            texts = [self._chat_text(chat) for chat in chats_with_answer(self.prompting.messages(QUESTION))]
            written = written_ends(texts, dict(zip(tokenizer.convert_ids_to_tokens(steering), steering)))
        return answer_ends(folder, tokenizer.eos_token_id, written, tokenizer.bos_token_id)

    def _chat_text(self, chat: Chat) -> str | None:
        """Text of a chat that holds an answer already; None if the template refuses it, which no prompt needs."""
        try:
            return self.rendered_chat(chat, self.prompting.template_kwargs, opens_answer=False)
        except ValueError:
            return None

    @property
    def _prompt_options(self) -> dict[str, bool]:
        if self.prompting.chat_template:
            return {"add_special_tokens": False}  # the template writes BOS itself
        return {"add_special_tokens": True, "split_special_tokens": False}

    def _checked(self, text: str, ids: Sequence[int]) -> tuple[int, ...]:
        """Ids of a prompt, without end tokens at its end and without a doubled BOS."""
        ids = tuple(ids)
        if not self.prompting.chat_template:
            # some tokenizers close every text with an end token; an answer cannot follow that
            bos_id = self.tokenizer.bos_token_id
            while ids and ids[-1] in self._closing_ids and not (len(ids) == 1 and ids[0] == bos_id):
                ids = ids[:-1]
            while ids[:2] == (bos_id, bos_id):
                ids = ids[1:]
        if not ids:
            raise ValueError(f"the prompt {text[:80]!r} has no tokens, so there is nothing to predict an answer from")
        return ids

    def _refuse_control_texts(self, text: str) -> None:
        if spelled := sorted(control for control in self._control_texts if control in text):
            raise ValueError(
                f"the prompt {text[:80]!r} spells out {', '.join(spelled)}, which steers the model of "
                f"{self.tokenizer.name_or_path}: inside a chat template it would end the user's turn. "
                "Remove it from the data, or switch chat_template off"
            )

    def _encode(self, text: str, **options: bool) -> list[int]:
        try:
            return self.tokenizer(text, **options).input_ids
        except Exception as error:  # the Rust tokenizers raise a bare Exception
            raise ValueError(f"the tokenizer cannot encode {text[:80]!r}: {error}") from error

    def _plain_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._encode(text, **PLAIN)) if text else ()

    def _answer_ids(self, text: str) -> tuple[int, ...] | None:
        try:
            return self.encode_answer(text, ended=False)
        except ValueError:
            return None

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _marks_starts(self) -> bool:
        """True if a text encoded by itself decodes differently after another: "x" then "x" decodes to "x x"."""
        for probe in filter(self._can_write, PROBES):
            ids = self._plain_ids(probe)
            return self._text(ids + ids) != probe + probe
        return False

    def _can_write(self, probe: str) -> bool:
        try:
            return self._text(self._plain_ids(probe)).strip() == probe
        except ValueError:
            return False

    def _appended_ids(self) -> frozenset[int]:
        """Control tokens that the tokenizer itself appends to every text."""
        probe = next(filter(self._can_write, PROBES), None)
        if probe is None:
            return frozenset()
        plain = self._plain_ids(probe)
        return self.control_ids.intersection(
            takewhile(lambda number: number not in plain, reversed(self._encode(probe)))
        )

    def _find_anchors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        usable = [a for a in ANCHORS if self._can_write(a) or self._text(self._plain_ids(a)) == a]
        return tuple((anchor, self._plain_ids(anchor)) for anchor in usable)


def with_opening(text: str, opening: str) -> str:
    """A task's text with an environment's opening behind it."""
    chat = messages_of(text)
    if chat is None:
        return text + opening
    *before, last = chat
    return messages_text([*before, last | {"content": last["content"] + opening}], tools_of(text))


def agent_codecs(agents: Sequence[AgentConfig], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[TextCodec, ...]:
    """Codec of every agent: all must be able to read a prompt before any agent is asked it.

    ValueError, one line that names the agent, for a tokenizer that does not fit its model.
    """
    return tuple(_agent_codec(agent, tools) for agent in agents)


def _agent_codec(agent: AgentConfig, tools: Sequence[Mapping[str, Any]]) -> TextCodec:
    try:
        codec = TextCodec(load_tokenizer(agent.model, agent.trust_remote_code), agent.prompting, tools)
        codec.require_fit(read_config(agent.model).get("vocab_size"))
    except ValueError as error:
        raise ValueError(f"agents.{agent.name}: {error}") from error
    return codec


def longest_encodings(
    agents: Sequence[AgentConfig], codecs: Sequence[TextCodec]
) -> Callable[[Sequence[str], int], list[int]]:
    """Function from texts to the highest number of tokens that any agent needs for each.

    Its second argument is the `limit` of `prompt_lengths`. Its ValueError names the agent.
    """

    def lengths(agent: AgentConfig, codec: TextCodec, texts: Sequence[str], limit: int) -> list[int]:
        try:
            return codec.prompt_lengths(texts, limit)
        except ValueError as error:
            raise ValueError(f"agents.{agent.name}: {error}") from error

    return lambda texts, limit: list(map(max, zip(*(lengths(*pair, texts, limit) for pair in zip(agents, codecs)))))
