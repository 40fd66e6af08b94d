"""Batched write of vLLM's log-prob record: all tokens that arrive together, instead of one by one.

decode_scheduler.py passes on many tokens at once. vLLM is passed in; only engine.py and patches.py import it.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any


def written_at_once(one_by_one: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Replacement of LogprobsProcessor's `_update_sample_logprobs`, which still handles all but the plain case.

    Plain: only the sampled token's log-prob, in flat lists, and no detokenisation.
    """

    @wraps(one_by_one)
    def update(processor: Any, found: Any) -> None:
        record = processor.logprobs
        if processor.num_logprobs != 0 or processor.tokenizer is not None or isinstance(record, list):
            one_by_one(processor, found)
            return
        values, start = found.logprobs[:, 0].tolist(), len(record.logprobs)
        record.start_indices += range(start, start + len(values))
        record.end_indices += range(start + 1, start + len(values) + 1)
        record.token_ids += found.logprob_token_ids[:, 0].tolist()
        record.logprobs += values
        record.ranks += found.sampled_token_ranks.tolist()
        record.decoded_tokens += [None] * len(values)
        for value in values:  # in this order, as rounding has it
            processor.cumulative_logprob += value

    return update
