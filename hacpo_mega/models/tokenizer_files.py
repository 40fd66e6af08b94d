"""Whether the tokenizer of a model folder fits its model: ids, end tokens, special tokens. Imports no torch.

Told from files alone, before anything is loaded. What they cannot tell is whether a tokenizer of the right size is
another model's, where the end tokens agree; and nothing is told of a tokenizer that is Python code of the folder, or
SentencePiece's: whoever loads it asks again (samples/tokenizers.py).
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import tokenizers

from hacpo_mega.models.documents import one_line, short
from hacpo_mega.models.folder import read_json

# Their tokenizer.json is all there is; another class may bring special tokens of its own.
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
LARGEST_BYTES = 256 * 2**20


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that the folder's files name, by key. ValueError, one line, for one that is no text."""
    described, found = read_json(folder / "tokenizer_config.json"), {}
    older = read_json(folder / "special_tokens_map.json")
    for key in SPECIAL:
        file = folder / ("tokenizer_config.json" if described.get(key) is not None else "special_tokens_map.json")
        value = described.get(key) if described.get(key) is not None else older.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if value is not None and (not isinstance(text, str) or not text):
            raise ValueError(f"{file}: {key} must be the text of a token, found {short(value)}")
        if value is not None:
            found[key] = text
    return found


def chat_template(folder: Path) -> tuple[Path, str] | None:
    """The template that transformers takes, and its file; None without one. ValueError for one that is no text."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file, _template_text(file)
    file = folder / "tokenizer_config.json"
    given = read_json(file).get("chat_template")
    if isinstance(given, list):  # of several
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
        if "default" not in named:
            raise ValueError(f"{file}: chat_template has no template named 'default'")
        given = named["default"]
    if given is not None and not isinstance(given, str):
        raise ValueError(f"{file}: chat_template must be a text, found {short(given)}")
    return (file, given) if given else None


def token_problems(folder: Path, vocab_size: int) -> list[str]:
    """Why the tokenizer in `folder` does not fit a model of `vocab_size` tokens, a line each."""
    file, described = folder / "tokenizer.json", folder / "tokenizer_config.json"
    try:
        special = special_tokens(folder)
        ends = _model_ids(folder, vocab_size)
        if not file.is_file() or "auto_map" in read_json(described):
            return []
        tokenizer = _loaded(file)
        if read_json(described).get("tokenizer_class") in PLAIN_CLASSES and "eos_token" not in special:
            return [f"{described} names no eos_token; answers could never end"]
        return [*_size_problems(folder, tokenizer, special, vocab_size)] or [
            *_end_problems(file, tokenizer, special, ends)
        ]
    except ValueError as problem:
        return [str(problem)]


def _model_ids(folder: Path, vocab_size: int) -> list[tuple[Path, int]]:
    """The ids that end answers by the model's own files. ValueError, one line, for any id that is no token of it."""
    ends = []
    for file in (folder / "config.json", folder / "generation_config.json"):
        for key in ID_KEYS:
            given = read_json(file).get(key)
            numbers = given if isinstance(given, list) and key == "eos_token_id" else [given]
            for number in numbers if given is not None else ():
                if type(number) is not int or not 0 <= number < vocab_size:
                    raise ValueError(
                        f"{file}: {key} must be the id of a token, from 0 to {vocab_size - 1} (vocab_size of "
                        f"config.json), found {short(number)}"
                    )
                ends += [(file, number)] if key == "eos_token_id" else []
    return ends


def _loaded(file: Path) -> tokenizers.Tokenizer:
    if file.stat().st_size > LARGEST_BYTES:
        raise ValueError(f"{file} has more than {LARGEST_BYTES:,} bytes")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # it raises a bare Exception for whatever it does not understand
        raise ValueError(f"{file} is no tokenizer: {one_line(str(error))}") from error


def _size_problems(
    folder: Path, tokenizer: tokenizers.Tokenizer, special: Mapping[str, str], vocab_size: int
) -> Iterator[str]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        yield f"{folder / 'tokenizer.json'} has no token"
        return
    token, highest = max(vocabulary.items(), key=lambda entry: entry[1])
    if highest >= vocab_size:
        beyond = sum(number >= vocab_size for number in vocabulary.values())
        yield (
            f"{folder / 'tokenizer.json'}: {beyond} tokens are beyond the model's {vocab_size} (vocab_size of "
            f"config.json), up to {short(token)} with id {highest}: it is another model's; copy the model's own"
        )
        return
    described = folder / "tokenizer_config.json"
    for number, entry in _described_tokens(described).items():
        if (known := vocabulary.get(entry)) is not None and known != number:
            yield f"{described}: {short(entry)} has id {number} there and {known} in tokenizer.json; copy both again"
            return
    unknown = {key: text for key, text in special.items() if text not in vocabulary}
    if "eos_token" in unknown:
        yield (
            f"{described}: eos_token {short(special['eos_token'])} is no token of tokenizer.json, so the model has "
            "never seen it and no answer would end; name the one that ends its answers"
        )
    elif unknown and highest + len(set(unknown.values())) >= vocab_size:
        key, text = next(iter(unknown.items()))
        yield (
            f"{described}: {key} {short(text)} is no token of tokenizer.json and would get an id beyond the model's "
            f"{vocab_size}; name one that there is"
        )


def _described_tokens(file: Path) -> dict[int, str]:
    """The added tokens that tokenizer_config.json lists, by id. ValueError, one line, for a list that is none."""
    given = read_json(file).get("added_tokens_decoder") or {}
    entries = given.items() if isinstance(given, dict) else [("", None)]
    found = {key: entry.get("content") if isinstance(entry, dict) else None for key, entry in entries}
    if not all(re.fullmatch("[0-9]{1,9}", key) and isinstance(text, str) for key, text in found.items()):
        raise ValueError(f"{file}: added_tokens_decoder must be an object of id -> token, found {short(given)}")
    return {int(key): text for key, text in found.items()}


def _end_problems(
    tokens: Path, tokenizer: tokenizers.Tokenizer, special: Mapping[str, str], ends: list[tuple[Path, int]]
) -> Iterator[str]:
    """An id that ends answers has to be a token that is no text: where it is a word, the tokenizer is another's."""
    steering = set(tokenizer.get_added_tokens_decoder()) | {tokenizer.token_to_id(text) for text in special.values()}
    for file, number in ends:
        if number not in steering:
            token = tokenizer.id_to_token(number)
            what = "no token" if token is None else f"the ordinary token {short(token)}"
            yield (
                f"{file}: eos_token_id {number} is {what} in {tokens}, so no answer would end where the model ends "
                "it: one of the two files is another model's"
            )
            return


def _template_text(file: Path) -> str:
    with file.open("rb") as stream:
        raw = stream.read(2**20 + 1)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: invalid UTF-8 at byte {error.start}") from error
    if len(raw) > 2**20:
        raise ValueError(f"{file} has more than {2**20:,} bytes")
    return text
