"""Checks that the tokenizer of a model folder fits its model: ids, end tokens, special tokens. Imports no torch.

Files alone are read, before anything is loaded. They cannot show that a tokenizer of the right size and end tokens
belongs to another model. Tokenizers that are Python code of the folder, or SentencePiece's, are not checked here but
when they are loaded (samples/tokenizers.py).
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from hacpo_mega.models.files.documents import one_line, short
from hacpo_mega.models.files.folder import read_json

# Classes that read tokenizer.json alone; another class may add special tokens of its own.
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
# Classes that replace a part of tokenizer.json by their own, and what that part holds where it says something else:
# bytes in place of SentencePiece's signs, or other splits of a text than GPT-2's.
OVERRULED = {
    **dict.fromkeys(("LlamaTokenizer", "GemmaTokenizer"), ("decoder", "ByteLevel")),
    "GPT2Tokenizer": ("pre_tokenizer", "Sequence"),
}
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
# Special tokens that a class of transformers adds where tokenizer_config.json has no such key.
CLASS_TOKENS = {
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GemmaTokenizer": {name + "_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
}
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
OLDER_MAP = "special_tokens_map.json"
LARGEST_BYTES = 256 * 2**20
# Added tokens that steer a model and are not marked special: </s> in Phi-3, <|fim_prefix|> in Qwen2.5, [PAD100015] in
# DeepSeek. Others are words of the model's own, such as <think>, and stay text.
CONTROL_SHAPE = re.compile(r"<[|\uff5c].+[|\uff5c]>|</?s>|[<\[](?:pad|unk|bos|eos|cls|sep|mask)\d*[>\]]", re.IGNORECASE)


def is_complete(folder: Path) -> bool:
    """True if tokenizer.json alone defines a folder's tokenizer: by its class, or since the named class misreads it."""
    described = read_json(folder / "tokenizer_config.json")
    if "auto_map" in described or not (folder / "tokenizer.json").is_file():
        return False
    return described.get("tokenizer_class") in PLAIN_CLASSES or names_wrong_class(folder)


def names_wrong_class(folder: Path) -> bool:
    """True if the class that a folder names would lose the spaces of its tokenizer.json, or split texts otherwise.

    Models of DeepSeek in the form of Llama or Qwen3 name Llama's class beside bytes, SmolLM2 names GPT-2's.
    """
    named = str(read_json(folder / "tokenizer_config.json").get("tokenizer_class")).removesuffix("Fast")
    part, sign = OVERRULED.get(named, ("", ""))
    return bool(part) and sign in json.dumps(read_json(folder / "tokenizer.json").get(part))


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that the folder's files name, by key. ValueError, one line, for one that is no text."""
    described, found = read_json(folder / "tokenizer_config.json"), {}
    older = _older_map(folder, described)
    for key in SPECIAL:
        file = folder / ("tokenizer_config.json" if described.get(key) is not None else OLDER_MAP)
        value = described.get(key) if described.get(key) is not None else older.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if value is not None and (not isinstance(text, str) or not text):
            raise ValueError(f"{file}: {key} must be the text of a token, found {short(value)}")
        if value is not None:
            found[key] = text
    return found


def _older_map(folder: Path, described: Mapping[str, Any]) -> Mapping[str, Any]:
    """special_tokens_map.json, which transformers reads where tokenizer_config.json does not list the added tokens."""
    return {} if "added_tokens_decoder" in described else read_json(folder / OLDER_MAP)


def token_texts(folder: Path, others: Collection[int]) -> dict[int, str]:
    """Texts of control tokens by id: special ones, added ones of CONTROL_SHAPE, and `others`.

    Empty for a folder without tokenizer.json. ValueError for one that is no tokenizer.
    """
    if not (folder / "tokenizer.json").is_file():
        return {}
    tokenizer = _loaded(folder / "tokenizer.json")
    control = {
        number: token.content
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if token.special or CONTROL_SHAPE.fullmatch(token.content)
    }
    named = [*others, *map(tokenizer.token_to_id, special_tokens(folder).values())]
    texts = {number: tokenizer.id_to_token(number) for number in named if number is not None}
    return control | {number: text for number, text in texts.items() if text is not None}


def mapping_digest(tokenizer_json: str) -> str:
    """Hash of the mapping between text and ids: model, merges, added tokens, normalizer, pre-tokenizer, decoder."""
    content = json.loads(tokenizer_json)
    kept = {k: content[k] for k in ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def folder_digest(folder: Path) -> str | None:
    """`mapping_digest` of a folder's tokenizer.json; None without one. ValueError for one that is no tokenizer."""
    file = folder / "tokenizer.json"
    return mapping_digest(_loaded(file).to_str()) if file.is_file() else None


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


def other_templates(folder: Path) -> list[str]:
    """The texts of the named templates beside it, which a prompt with tools may be rendered by."""
    given = read_json(folder / "tokenizer_config.json").get("chat_template")
    named = [entry.get("template") for entry in given if isinstance(entry, dict)] if isinstance(given, list) else []
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return [text for text in named if isinstance(text, str)] + [_template_text(file) for file in files]


def token_problem(folder: Path, vocab_size: int) -> str | None:
    """A line on why the tokenizer in `folder` does not fit a model of `vocab_size` tokens; None if it does."""
    file, described = folder / "tokenizer.json", folder / "tokenizer_config.json"
    try:
        special = special_tokens(folder)
        ends = _model_ids(folder, vocab_size)
        if not file.is_file() or "auto_map" in read_json(described):
            return None
        tokenizer = _loaded(file)
        if read_json(described).get("tokenizer_class") in PLAIN_CLASSES and "eos_token" not in special:
            return f"{described} names no eos_token; answers could never end"
        return _size_problem(folder, tokenizer, special, vocab_size) or _end_problem(file, tokenizer, special, ends)
    except ValueError as problem:
        return str(problem)


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


def _size_problem(
    folder: Path, tokenizer: tokenizers.Tokenizer, special: Mapping[str, str], vocab_size: int
) -> str | None:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        return f"{folder / 'tokenizer.json'} has no token"
    token, highest = max(vocabulary.items(), key=lambda entry: entry[1])
    if highest >= vocab_size:
        beyond = sum(number >= vocab_size for number in vocabulary.values())
        return (
            f"{folder / 'tokenizer.json'}: {beyond} tokens are beyond the model's {vocab_size} (vocab_size of "
            f"config.json), up to {short(token)} with id {highest}: it is another model's; copy the model's own"
        )
    described = folder / "tokenizer_config.json"
    for number, entry in _described_tokens(described).items():
        if (known := vocabulary.get(entry)) is not None and known != number:
            return f"{described}: {short(entry)} has id {number} there and {known} in tokenizer.json; copy both again"
    if "eos_token" in special and special["eos_token"] not in vocabulary:
        return (
            f"{described}: eos_token {short(special['eos_token'])} is no token of tokenizer.json, so the model has "
            "never seen it and no answer would end; name the one that ends its answers"
        )
    unknown = {text: (file, key) for file, key, text in _named_tokens(folder) if text not in vocabulary}
    if unknown and highest + len(unknown) >= vocab_size:
        text, (file, key) = next(iter(unknown.items()))
        return (
            f"{file}: {key} {short(text)} is no token of tokenizer.json and would get an id beyond the model's "
            f"{vocab_size}; name one that there is"
        )
    return None


def _named_tokens(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """Every token that the files beside tokenizer.json name: file, key, text. transformers adds those that are new."""
    described = folder / "tokenizer_config.json"
    table = read_json(described)
    older = _older_map(folder, table)
    yield from ((described, "added_tokens_decoder", text) for text in _described_tokens(described).values())
    if "added_tokens_decoder" not in table:
        added = folder / "added_tokens.json"
        yield from ((added, "the token", text) for text in read_json(added))
    for file, named in ((described, table), (folder / OLDER_MAP, older)):
        for key, value in named.items():
            text = value.get("content") if key in SPECIAL and isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                yield file, key, text
            elif key in LISTS and value is not None:
                yield from ((file, key, token) for token in _listed(file, key, value))
    class_name = str(table.get("tokenizer_class")).removesuffix("Fast")
    for key, text in ({} if is_complete(folder) else CLASS_TOKENS.get(class_name, {})).items():
        if key not in table and key not in older:
            yield described, f"tokenizer_class {table['tokenizer_class']} with its {key}", text


def _listed(file: Path, key: str, value: Any) -> list[str]:
    """The texts in a list of tokens, or in a table of them. ValueError, one line, where one is no text."""
    texts = list(value.values()) if isinstance(value, dict) else value
    # Older versions of transformers wrote the tokens of a table with their flags, which newer ones do not read.
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{file}: {key} must be the texts of tokens, found {short(value)}")
    return texts


def _described_tokens(file: Path) -> dict[int, str]:
    """The added tokens that tokenizer_config.json lists, by id. ValueError, one line, for a list that is none."""
    given = read_json(file).get("added_tokens_decoder") or {}
    entries = given.items() if isinstance(given, dict) else [("", None)]
    found = {key: entry.get("content") if isinstance(entry, dict) else None for key, entry in entries}
    if not all(re.fullmatch("[0-9]{1,9}", key) and isinstance(text, str) for key, text in found.items()):
        raise ValueError(f"{file}: added_tokens_decoder must be an object of id -> token, found {short(given)}")
    return {int(key): text for key, text in found.items()}


def _end_problem(
    tokens: Path, tokenizer: tokenizers.Tokenizer, special: Mapping[str, str], ends: list[tuple[Path, int]]
) -> str | None:
    """Checks that an id that ends answers is a control token: if it is text, the tokenizer is another model's."""
    control = set(tokenizer.get_added_tokens_decoder()) | {tokenizer.token_to_id(text) for text in special.values()}
    for file, number in ends:
        if number not in control:
            token = tokenizer.id_to_token(number)
            meaning = "no token" if token is None else f"the ordinary token {short(token)}"
            return (
                f"{file}: eos_token_id {number} is {meaning} in {tokens}, so no answer would end where the model ends "
                "it: one of the two files is another model's"
            )
    return None


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
