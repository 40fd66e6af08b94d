"""Permanent patches of vLLM, with the reason of each (cluster/patches.py).

Not here: replacements while an engine starts (host_process.py), and on live objects (engine.py).
"""

from collections.abc import Callable
from functools import wraps

from vllm.distributed import parallel_state
from vllm.distributed.aux_output_connector import worker
from vllm.utils import jit_monitor
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from hacpo_mega.cluster.patches import Patch
from hacpo_mega.rollout.vllm.host_process import keeping_default_group, without_message_queue
from hacpo_mega.rollout.vllm.routing import on_every_rank

Update = Callable[[LogprobsProcessor, LogprobsLists], None]


def written_at_once(one_by_one: Update) -> Update:
    """Replacement of LogprobsProcessor's `_update_sample_logprobs`, which still handles all but the plain case.

    All tokens that arrive together are written at once: decode_scheduler.py passes on many. Plain: only the sampled
    token's log-prob, in flat lists, and no detokenisation.
    """

    @wraps(one_by_one)
    def update(processor: LogprobsProcessor, found: LogprobsLists) -> None:
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


_KEEPING = "the default group is the trainer's; also when an engine that nobody closed is collected"
_QUEUE = "a queue between ranks would unpickle what its sockets bring"
_EXPERTS = "every rank of an engine keeps the experts that its tokens went to"
_MONITOR = "it watches the whole process: it warns of the trainer's own kernels, or fails them"
_ARRAYS = "log-probs of a step are written as arrays, not as an object a token"

VLLM = (
    Patch(parallel_state, "destroy_distributed_environment", keeping_default_group, _KEEPING, wraps=True),
    Patch(parallel_state, "init_model_parallel_group", without_message_queue, _QUEUE, wraps=True),
    Patch(worker, "get_tp_group", on_every_rank, _EXPERTS),
    Patch(jit_monitor, "activate", lambda **_how: None, _MONITOR),
    Patch(LogprobsProcessor, "_update_sample_logprobs", written_at_once, _ARRAYS, wraps=True),
)
