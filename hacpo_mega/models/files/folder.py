"""The JSON files of a Hugging Face folder, read here and nowhere else. Imports no torch.

Elsewhere: the shape of the model (architecture.py), its tensors (weight_files.py), and text (samples/tokenizers.py).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hacpo_mega.models.files.documents import json_file, one_line, short
from hacpo_mega.models.files.hub import missing_folder, not_cached

DTYPES = ("float32", "bfloat16", "float16")
# One of these is the tokenizer of a Hugging Face folder, beside the files that only describe it.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
# Fields with the number of multi-token prediction layers: the older one, the newer one.
PREDICTS = ("num_nextn_predict_layers", "num_mtp_layers")
# Files that turn text into prompts and end answers: tokenizers of all kinds, chat templates, generation settings.
TEXT_FILES = (
    *TOKENIZER_FILES,
    *("tokenizer.*.json", "*.model", "*.tiktoken", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "merges.txt", "generation_config.json", "chat_template.jinja"),
    "additional_chat_templates/*.jinja",
)
IMAGE_FILES = ("*processor_config.json", "chat_template.json")
NOTICES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")  # which go with every copy of a model
ADAPTER_NAMES = ("adapter_config.json", "adapter_model.")
# Fields of an image checkpoint that lie beside its `text_config` and hold for the text model, too.
_OF_BOTH = ("architectures", "dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")
_OF_BOTH += ("pad_token_id", "quantization_config")
MERGE = "merge it into its base (merge_and_unload of peft), or give the base, with [agents.lora] to train adapters"


def read_config(folder: Path) -> Mapping[str, Any]:
    """`folder`/config.json; of an image checkpoint the fields of its text model, as text_fields has them.

    ValueError, one line, for a folder without one, or with one that is no JSON object.
    """
    if not (folder / "config.json").is_file():
        if adapter_files(folder):
            raise ValueError(f"model folder {folder} holds an adapter{of_base(folder)} and no config.json; {MERGE}")
        if model := not_cached(folder):
            raise ValueError(
                f"model folder {folder} has no config.json, and the Hugging Face cache has no model of that name; "
                f"`{model.download}` fetches it, as `hacpo-mega train` does where there is a network"
            )
        if not folder.is_dir():
            raise ValueError(missing_folder(folder))
        raise ValueError(
            f"model folder {folder} has no config.json; give a Hugging Face folder, such as RUN/agents/NAME"
        )
    return text_fields(folder)


def text_fields(folder: Path) -> Mapping[str, Any]:
    """The fields of a folder's text model; empty without a config.json.

    An image checkpoint has them in `text_config`. transformers and this project take the fields beside it first.
    """
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, dict):
        raise ValueError(f"{folder / 'config.json'}: text_config must be an object, found {short(text)}")
    beside = {name: config[name] for name in _OF_BOTH if config.get(name) is not None}
    has_type = beside.keys() & {"dtype", "torch_dtype"}
    return {key: value for key, value in text.items() if not (has_type and key in ("dtype", "torch_dtype"))} | beside


def has_tower(folder: Path) -> bool:
    """True for an image checkpoint: a text model beside a vision tower."""
    return read_json(folder / "config.json").get("text_config") is not None


def text_files(folder: Path) -> list[Path]:
    """The files of TEXT_FILES that a folder has, and its Python files where it names code of its own (auto_map)."""
    has_code = any("auto_map" in read_json(folder / name) for name in ("config.json", "tokenizer_config.json"))
    return _files(folder, (*TEXT_FILES, "*.py") if has_code else TEXT_FILES)


def copied_files(folder: Path, *, text_only: bool = False) -> list[Path]:
    """Files that a copy of a model keeps beside its weights and config.json: text files and licences.

    An image checkpoint keeps the files of its image processor, too, unless `text_only`. A README, an adapter and an
    optimizer's state do not belong to a copy.
    """
    reads_images = has_tower(folder) and not text_only
    return [*text_files(folder), *_files(folder, (*NOTICES, *IMAGE_FILES) if reads_images else NOTICES)]


def _files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def adapter_files(folder: Path) -> list[str]:
    """Names of the files with which peft marks a folder as that of an adapter."""
    return sorted(path.name for path in folder.glob("adapter_*") if path.name.startswith(ADAPTER_NAMES))


def of_base(folder: Path) -> str:
    """The text that names the base of the adapter in a folder; none if its adapter_config.json does not."""
    base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    return f" of {one_line(base)}" if isinstance(base, str) and base else ""


def read_json(file: Path) -> Mapping[str, Any]:
    """The object in a JSON file; empty without the file. ValueError, one line, when it holds anything else."""
    if not file.is_file():
        return {}
    table = json_file(file)
    if not isinstance(table, dict):
        raise ValueError(f"{file}: must hold a JSON object, found a {type(table).__name__}")
    return table


def named_ends(folder: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that end an answer by the model's own files, in their order: those of the first file, and all.

    The first is generation_config.json, or config.json where that names none.
    """
    files = read_json(folder / "generation_config.json"), text_fields(folder)
    values = [fields.get("eos_token_id") for fields in files]
    by_file = [(ids,) if isinstance(ids, int) else tuple(ids or ()) for ids in values]
    return by_file[0] or by_file[1], tuple(dict.fromkeys((*by_file[0], *by_file[1])))


def dtype_name(folder: Path) -> str:
    """The floating-point type that config.json names, such as "bfloat16", that of packed weights where it names none.
    ValueError when it is none of DTYPES."""
    config = read_config(folder)
    usual = "bfloat16" if config.get("quantization_config") else "float32"
    name = config.get("dtype") or config.get("torch_dtype") or usual
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"{folder / 'config.json'}: dtype {short(name)} is unknown; expected {', '.join(DTYPES)}")
    return name


def with_dtype(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A config.json with the dtype `name`, under the keys that it uses already, also in its text_config."""
    keys = config.keys() & {"dtype", "torch_dtype"} or {"dtype"}
    changed = {**config, **dict.fromkeys(keys, name)}
    if isinstance(text := config.get("text_config"), dict) and text.keys() & {"dtype", "torch_dtype"}:
        changed["text_config"] = with_dtype(text, name)
    return changed


def head_size(folder: Path) -> int | None:
    """Size of one attention head, of any architecture; None if config.json lacks it."""
    config = read_config(folder)
    if config.get("head_dim"):
        return config["head_dim"]
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return hidden // heads if hidden and heads else None


def check_positions(folder: Path, max_prompt_tokens: int, max_answer_tokens: int) -> None:
    """ValueError when prompt and answer may exceed the positions of the model."""
    positions = read_config(folder).get("max_position_embeddings")
    if positions is not None and max_prompt_tokens + max_answer_tokens > positions:
        raise ValueError(
            f"prompts of {max_prompt_tokens} and answers of {max_answer_tokens} tokens exceed the {positions} "
            f"positions of {folder}: lower one of them, for example "
            f"{_fitting(positions, max_prompt_tokens, max_answer_tokens)}"
        )


def _fitting(positions: int, prompt: int, answer: int) -> str:
    """The keys with which prompt and answer fit: a shorter answer, else a shorter prompt, else both."""
    if positions > prompt:
        return f"max_answer_tokens={positions - prompt}"
    if positions > answer:
        return f"max_prompt_tokens={positions - answer}"
    return f"max_prompt_tokens={max(1, positions // 2)} max_answer_tokens={max(1, positions - positions // 2)}"


def tokenizer_problem(folder: Path, needs_template: bool) -> str | None:
    """A line if the folder holds no tokenizer, or lacks a chat template that is needed; else None."""
    try:
        described = read_json(folder / "tokenizer_config.json")
    except ValueError as error:
        return str(error)
    if "auto_map" not in described and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        known = ", ".join(TOKENIZER_FILES)
        return f"model folder {folder} has no tokenizer (one of {known}); copy it from the original"
    has_template = described.get("chat_template") or (folder / "chat_template.jinja").is_file()
    if needs_template and not has_template:
        return (
            f"chat_template = true, but {folder} has none, neither chat_template.jinja nor in tokenizer_config.json; "
            "set chat_template = false for a base model, or add the file"
        )
    return None
