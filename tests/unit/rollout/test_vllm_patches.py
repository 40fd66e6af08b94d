"""Records that wait for their answer's end, and slots inside a block, against vLLM's own way step by step."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import make_model
from vllm import ModelRegistry, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import _LazyRegisteredModel
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from hacpo_mega.rollout.vllm import patches
from hacpo_mega.rollout.vllm.patches import MergedRecords, inside_a_block, written_at_once

LENGTHS = (1, 2, 63, 64, 65, 66, 150, 200)  # around the most tokens that are held


def record(name: str, step: int, length: int) -> EngineCoreOutput:
    """A token of a request of so many tokens, as vLLM's scheduler reports it."""
    token, logprob = 10 + step, np.float32(-1 / (1 + step))
    lists = LogprobsLists(np.array([[token]]), np.array([[logprob]]), np.array([step]), None)
    ended = FinishReason.LENGTH if step == length - 1 else None
    return EngineCoreOutput(name, [token], new_logprobs=lists, finish_reason=ended)


def said(output) -> tuple:
    answer = output.outputs[0]
    return output.request_id, answer.token_ids, answer.logprobs, answer.cumulative_logprob, answer.finish_reason


def processed(monkeypatch, merges: bool) -> tuple[list, list, int]:
    """By step what ended, what runs after 160 steps, and the records that vLLM was given one by one."""
    monkeypatch.setattr(
        LogprobsProcessor, "_update_sample_logprobs", written_at_once(LogprobsProcessor._update_sample_logprobs)
    )
    processor, given = OutputProcessor(None, log_stats=False), []
    for number, _ in enumerate(LENGTHS):
        how = SamplingParams(logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        request = EngineCoreRequest(
            str(number), [3], None, how, None, 0.0, None, None, None, external_req_id=str(number)
        )
        processor.add_request(request, None)
    own = processor.process_outputs
    counting = lambda records, *rest, **how: given.extend(records) or own(records, *rest, **how)  # noqa: E731
    process = MergedRecords(counting) if merges else counting
    ended = []
    for step in range(160):
        records = [record(str(n), step, length) for n, length in enumerate(LENGTHS) if step < length]
        ended.append([said(one) for one in process(records, weight_version="1").request_outputs])
    if merges:
        process.flush()
    states = processor.request_states.values()
    return ended, [said(s.make_request_output([], None, FinishReason.ABORT, None)) for s in states], len(given)


def test_merged_records_are_the_answers_of_single_ones(monkeypatch):
    ended, running, handled = processed(monkeypatch, merges=False)
    merged_ended, merged_running, merged_handled = processed(monkeypatch, merges=True)
    assert merged_ended == ended and [len(step) for step in ended].count(1) == len(LENGTHS) - 1
    assert merged_running == running and len(running[0][1]) == 160
    assert handled == sum(min(length, 160) for length in LENGTHS)
    assert merged_handled == sum(-(-min(length, 160) // 64) for length in LENGTHS)


@pytest.mark.nightly
def test_a_class_is_read_here_as_in_a_process_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    model = ModelRegistry.models["Qwen3MoeForCausalLM"]
    assert patches.inspected_here(model) == _LazyRegisteredModel.inspect_model_cls(model)
    assert list((tmp_path / "modelinfos").iterdir()), "vLLM kept what the process found"


def test_records_that_bring_more_than_tokens_are_passed_on_at_once():
    given = []
    process = MergedRecords(lambda records, *_: given.append([one.new_token_ids for one in records]))
    first, second, third = (record("0", step, 9) for step in range(3))
    second.routed_experts = np.zeros((1, 2, 1))
    for one in (first, second, third):
        process([one])
    process([record("0", 3, 9)], None, SimpleNamespace())
    assert given == [[], [[10, 11]], [], [[13]]], "statistics are of every record"


def scheduled(folder, kind: type[Scheduler], layer: FullAttentionSpec) -> list:
    """By step the blocks that requests get, who is preempted, and the number of blocks that a prompt could meet."""
    arguments = {"dtype": "float32", "max_model_len": 128, "skip_tokenizer_init": True, "enable_prefix_caching": True}
    config = EngineArgs(model=str(folder), max_num_batched_tokens=512, **arguments).create_engine_config()
    config.scheduler_config.async_scheduling, config.cache_config.num_gpu_blocks = kind is AsyncScheduler, 20
    cache = KVCacheConfig(num_blocks=20, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)])
    scheduler = kind(
        vllm_config=config, kv_cache_config=cache, structured_output_manager=StructuredOutputManager(config),
        block_size=16, hash_block_size=16, log_stats=False,
    )  # fmt: skip
    init_none_hash(sha256)
    hasher, pool = get_request_block_hasher(16, sha256), scheduler.kv_cache_manager.block_pool
    for number in range(7):  # more than the cache holds: some are preempted
        how = SamplingParams(max_tokens=30 + number)
        prompt = [20 + number] * (29 + 3 * number)
        scheduler.add_request(Request(str(number), prompt, how, None, block_hasher=hasher))
    found, in_flight = [], []
    while len(found) < 300 and (scheduler.has_unfinished_requests() or in_flight):
        step = scheduler.schedule()
        new, old = step.scheduled_new_reqs, step.scheduled_cached_reqs
        given = [(one.req_id, one.block_ids) for one in new], list(zip(old.req_ids, old.new_block_ids, strict=True))
        found.append((given, set(step.preempted_req_ids or ()), len(pool.cached_block_hash_to_block)))
        in_flight.append(step)
        if len(in_flight) > (kind is AsyncScheduler) or not step.total_num_scheduled_tokens:
            done = in_flight.pop(0)
            names = list(done.num_scheduled_tokens)
            rows = {name: row for row, name in enumerate(names)}
            scheduler.update_from_output(done, ModelRunnerOutput(names, rows, [[5] for _ in names]))
    return found


LAYER = {"block_size": 16, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}


@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
@pytest.mark.parametrize("layer", [FullAttentionSpec(**LAYER), SlidingWindowSpec(**LAYER, sliding_window=24)])
def test_slots_inside_a_block_are_vllms(tmp_path, monkeypatch, kind, layer):
    folder, calls = make_model(tmp_path / "model", "qwen3"), []
    own = next(patch for patch in patches.VLLM if patch.name == "allocate_slots").original()
    counting = lambda *given, **how: calls.append(given[2]) or own(*given, **how)  # noqa: E731
    found, taken = [], []
    for allocate in (counting, inside_a_block(counting)):
        calls.clear()
        monkeypatch.setattr(KVCacheManager, "allocate_slots", allocate)
        found.append(scheduled(folder, kind, layer))
        taken.append(calls.count(1))
    assert found[0] == found[1]
    assert any(preempted for _, preempted, _ in found[0]), "the cache was too small for all"
    assert len({blocks for *_, blocks in found[0]}) > 1, "blocks became known as they filled"
    is_full = type(layer) is FullAttentionSpec
    assert taken[1] < taken[0] / 4 if is_full else taken[1] == taken[0]
