"""Permanent patches of vLLM, with the reason of each (cluster/patches.py).

Not here: replacements while an engine starts (vllm/host_process.py), and on live objects (cpu/).
"""

from vllm.distributed import parallel_state
from vllm.distributed.aux_output_connector import worker
from vllm.utils import jit_monitor
from vllm.v1.engine.logprobs import LogprobsProcessor

from hacpo_mega.cluster.patches import Patch
from hacpo_mega.rollout.vllm.flat_logprobs import written_at_once
from hacpo_mega.rollout.vllm.host_process import keeping_default_group, unwatched, without_message_queue
from hacpo_mega.rollout.vllm.routing import on_every_rank

_KEEPING = "the default group is the trainer's; also when an engine that nobody closed is collected"
_QUEUE = "a queue between ranks would unpickle what its sockets bring"
_EXPERTS = "every rank of an engine keeps the experts that its tokens went to"
_MONITOR = "it watches the whole process: it warns of the trainer's own kernels, or fails them"
_ARRAYS = "log-probs of a step are written as arrays, not as an object a token"

VLLM = (
    Patch(parallel_state, "destroy_distributed_environment", keeping_default_group, _KEEPING, wraps=True),
    Patch(parallel_state, "init_model_parallel_group", without_message_queue, _QUEUE, wraps=True),
    Patch(worker, "get_tp_group", on_every_rank, _EXPERTS),
    Patch(jit_monitor, "activate", unwatched, _MONITOR),
    Patch(LogprobsProcessor, "_update_sample_logprobs", written_at_once, _ARRAYS, wraps=True),
)
