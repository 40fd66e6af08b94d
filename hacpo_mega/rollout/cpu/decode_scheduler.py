"""vLLM's scheduler with a fast path for steps that only decode: every running request gets one token.

Most steps of a rollout are of this kind, and vLLM's own path walks over each request: slots, hashes, a record of its
one token, the passing on of that record. The fast path looks only at requests at the edge of a cache block, through
vLLM's own functions in vLLM's order, and holds tokens back until their request ends. Requests, blocks, hashes,
preemptions and ends equal vLLM's to the bit (tests/jobs/test_decode_scheduler.py). A step with anything else, such as a
new request, a missing block or a chunked prompt, takes vLLM's path.
It saves 37 % of the quickstart's roll-out (docs/measurements/profile.md).

Elsewhere: sampling (row_noise.py), reporting of answers (engine.py).
"""

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

# Held tokens are passed on after this many steps, so that they take little memory however long answers are.
MOST_HELD = 64


class DecodeBatch:
    """R requests that all get one token a step, in the scheduler's order, with the tokens not passed on yet.

    computed_R   tokens of each whose keys and values are in the cache; it has one more
    left_R       tokens that each may still get
    scheduled    the step that the model has been given
    num_held     last tokens of each that have not been passed on
    """

    def __init__(self, requests: Sequence[Request], max_model_len: int) -> None:
        """`requests` must satisfy `are_decoding`."""
        self.requests = list(requests)
        self.ids = [request.request_id for request in requests]
        self.computed_R = np.array([request.num_computed_tokens for request in requests])
        self.num_outputs_R = np.array([request.num_output_tokens for request in requests])
        self.left_R = np.array(
            [min(r.max_tokens - r.num_output_tokens, max_model_len - r.num_tokens) for r in requests]
        )
        params = requests[0].sampling_params
        self.ends = np.array(_ends(params), np.int64)
        self.wants_logprobs = params.num_logprobs is not None
        self.scheduled: SchedulerOutput | None = None
        self.num_held = 0
        self._logprobs_RT = np.empty((len(requests), MOST_HELD), np.float32)
        self._ranks_RT = np.empty((len(requests), MOST_HELD), np.int64)
        self._row_ids: list[str] = []
        self._rows_R = np.arange(0)

    def at_block_edge(self, block_size: int) -> tuple[list[int], int]:
        """Indices of requests whose next token opens or fills a block, and the number that open one."""
        offset_R = self.computed_R % block_size
        opens_R = offset_R == 0
        return np.flatnonzero(opens_R | (offset_R == block_size - 1)).tolist(), int(opens_R.sum())

    def advance(self) -> None:
        """Notes that the model reads the last token of each."""
        for request in self.requests:
            request.num_computed_tokens += 1
        self.computed_R += 1

    def take(self, answered: ModelRunnerOutput) -> np.ndarray:
        """Appends the sampled token of each request; returns whether it was its last one, bool [R]."""
        if answered.req_ids != self._row_ids:
            self._row_ids = answered.req_ids
            self._rows_R = np.array([answered.req_id_to_index[name] for name in self.ids])
        tokens_R = np.array(answered.sampled_token_ids)[self._rows_R, 0]
        for request, token in zip(self.requests, tokens_R.tolist(), strict=True):
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
        if self.wants_logprobs:
            self._logprobs_RT[:, self.num_held] = answered.logprobs.logprobs[self._rows_R, 0]
            self._ranks_RT[:, self.num_held] = answered.logprobs.sampled_token_ranks[self._rows_R]
        self.num_outputs_R += 1
        self.left_R -= 1
        self.num_held += 1
        return np.isin(tokens_R, self.ends) | (self.left_R == 0)

    def held(self, index: int) -> tuple[list[int], LogprobsLists | None]:
        """Held tokens of a request, with their log-probs in vLLM's form."""
        tokens = self.requests[index]._output_token_ids[-self.num_held :]
        if not self.wants_logprobs:
            return tokens, None
        logprobs_T1 = self._logprobs_RT[index, : self.num_held, None].copy()
        ranks_T = self._ranks_RT[index, : self.num_held].copy()
        return tokens, LogprobsLists(np.array(tokens)[:, None], logprobs_T1, ranks_T)

    def keep(self, goes_on_R: np.ndarray) -> None:
        """Drops the requests that have ended; goes_on_R bool [R]."""
        self.requests, self.ids = (list(compress(row, goes_on_R)) for row in (self.requests, self.ids))
        self.computed_R, self.num_outputs_R = self.computed_R[goes_on_R], self.num_outputs_R[goes_on_R]
        self.left_R, self._row_ids = self.left_R[goes_on_R], []
        self._logprobs_RT, self._ranks_RT = self._logprobs_RT[goes_on_R], self._ranks_RT[goes_on_R]


class DecodeScheduler(Scheduler):
    """vLLM's scheduler with the fast path."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Same arguments as vLLM's Scheduler."""
        super().__init__(*arguments, **options)
        self._batch: DecodeBatch | None = None
        self._held_back: list[EngineCoreOutput] = []
        self._has_fast_path = self._supports_fast_path()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedules the next step, on the fast path if it only decodes."""
        batch = None if throttle_prefills else self._decoding()
        if batch is None:
            self._leave()
            return super().schedule(throttle_prefills)
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        new_blocks: list[Any] = [None] * len(batch.requests)
        for index in batch.at_block_edge(self.block_size)[0]:
            slots = self.kv_cache_manager.allocate_slots(batch.requests[index], 1)
            new_blocks[index] = slots.get_block_ids(allow_none=True)
        self.prefill_capacity_bound = self.get_request_counts()[1] > len(self.deferred_waiting)
        batch.scheduled = self._scheduler_output(batch, new_blocks)
        batch.advance()
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        return batch.scheduled

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Output of a step: requests that ended, or all requests after MOST_HELD steps."""
        batch = self._batch
        if batch is not None and batch.requests != self.running:  # some were ended from outside, within the step
            for request in batch.requests:
                request.num_in_flight_tokens += 1
            self._leave()
            batch = None
        if batch is None or batch.scheduled is not scheduler_output:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            return self._with_held_back(outputs)
        batch.scheduled = None
        ended_R = batch.take(model_runner_output)
        # Hashes blocks that the sampled token has filled, as vLLM does for every token.
        for index in np.flatnonzero((batch.computed_R + 1) % self.hash_block_size == 0).tolist():
            batch.requests[index].update_block_hashes()
        outputs = [self._end_request(batch, index) for index in np.flatnonzero(ended_R).tolist()]
        if outputs:
            goes_on_R = ~ended_R
            self.running = list(compress(self.running, goes_on_R))
            batch.keep(goes_on_R)
        if batch.num_held == MOST_HELD:
            outputs += self._pop_held(batch)
        return self._with_held_back({0: EngineCoreOutputs(outputs=outputs)} if outputs else {})

    def take_held(self) -> list[EngineCoreOutput]:
        """Records of the held tokens, for vLLM's output processor: they complete running answers."""
        self._leave()
        held, self._held_back = self._held_back, []
        return held

    def _decoding(self) -> DecodeBatch | None:
        """Batch of the running requests if the next step only decodes; else None."""
        if not self._has_fast_path or not self.running or self._pause_state != PauseState.UNPAUSED:
            return None
        if self._batch is None or self._batch.requests != self.running:
            self._leave()
            if not self._cannot_admit(0) or not are_decoding(self.running, self.prev_step_scheduled_req_ids):
                return None
            self._batch = DecodeBatch(self.running, self.max_model_len)
        num_opened = self._batch.at_block_edge(self.block_size)[1]
        enough = num_opened <= self.kv_cache_manager.block_pool.get_num_free_blocks()
        return self._batch if enough and self._cannot_admit(num_opened) else None

    def _cannot_admit(self, num_blocks: int) -> bool:
        """True if no waiting request can start, once `num_blocks` more blocks are given to the running ones."""
        most = min(self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens)
        if len(self.running) > most or self.kv_holding_waiting:
            return False
        running = len(self.running) + self.num_waiting_for_streaming_input
        if not self.waiting or running >= self.max_num_active_reqs or len(self.running) == most:
            return True
        first, slots = self.waiting.peek_request(), self.kv_cache_manager
        if first.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            return False
        if self.scheduler_config.enable_chunked_prefill or first.num_computed_tokens:
            return False
        hits, num_hits, _ = slots.get_computed_blocks(first)
        needed = slots.coordinator.get_num_blocks_to_allocate(
            request_id=first.request_id,
            num_tokens=min(first.num_tokens, self.max_model_len),
            new_computed_blocks=hits.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=num_hits,
            num_local_computed_tokens=num_hits,
            num_tokens_main_model=first.num_tokens,
        )
        return needed + slots.watermark_blocks > slots.block_pool.get_num_free_blocks() - num_blocks

    def _scheduler_output(self, batch: DecodeBatch, new_blocks: list[Any]) -> SchedulerOutput:
        """vLLM's record of a step in which all requests get a token."""
        cached = CachedRequestData(
            req_ids=batch.ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=new_blocks,
            num_computed_tokens=batch.computed_R.tolist(),
            num_output_tokens=batch.num_outputs_R.tolist(),
        )
        return SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict.fromkeys(batch.ids, 1),
            total_num_scheduled_tokens=len(batch.ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
            num_spec_tokens_to_schedule=self.num_spec_tokens,
            ec_manager_metadata=self.encoder_cache_manager.get_manager_metadata(),
        )

    def _end_request(self, batch: DecodeBatch, index: int) -> EngineCoreOutput:
        """Frees an ended request; returns the record of its held tokens."""
        request = batch.requests[index]
        assert check_stop(request, self.max_model_len), request.request_id
        output = self._record(batch, index, request.get_finished_reason())
        self._free_request(request)
        return output

    def _record(self, batch: DecodeBatch, index: int, finish_reason: FinishReason | None) -> EngineCoreOutput:
        tokens, logprobs = batch.held(index)
        return EngineCoreOutput(
            request_id=batch.ids[index],
            new_token_ids=tokens,
            new_logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=batch.requests[index].stop_reason,
        )

    def _pop_held(self, batch: DecodeBatch) -> list[EngineCoreOutput]:
        if batch.num_held == 0:
            return []
        records = [self._record(batch, index, None) for index in range(len(batch.ids))]
        batch.num_held = 0
        return records

    def _leave(self) -> None:
        """Leaves the fast path: held tokens go out with the output of the next step, on whichever path it is."""
        if self._batch is not None:
            self._held_back += self._pop_held(self._batch)
            self._batch = None

    def _with_held_back(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        """Prepends held-back records to `outputs`, which are by client."""
        if self._held_back:
            of_client = outputs.setdefault(0, EngineCoreOutputs())
            of_client.outputs = self._held_back + list(of_client.outputs)
            self._held_back = []
        return outputs

    def _supports_fast_path(self) -> bool:
        """True if no feature of this engine adds anything to a step but tokens in one cache of full attention."""
        managers = self.kv_cache_manager.coordinator.single_type_managers
        features = (
            self.connector, self.ec_connector, self.aux_output_connector, self.lora_config, self.perf_metrics,
            self.finished_req_ids_dict, self.vllm_config.speculative_config,
        )  # fmt: skip
        switches = (
            self.use_pp, self.use_v2_model_runner, self.log_stats, self.scheduler_config.async_scheduling,
            self.has_mamba_layers, self.needs_kv_cache_zeroing, self.is_encoder_decoder, self.is_mm_encoder_only,
            self.defer_block_free, self.enable_kv_cache_events, self.return_sampling_mask,
            self.spec_decode_metrics_level != "none", self.num_sampled_tokens_per_step != 1, self.num_lookahead_tokens,
            self.dcp_world_size > 1, self.pcp_world_size > 1,
        )  # fmt: skip
        is_plain = all(feature is None for feature in features) and not any(switches)
        return is_plain and [type(manager).__name__ for manager in managers] == ["FullAttentionManager"]


def are_decoding(requests: Sequence[Request], last_scheduled: set[str]) -> bool:
    """True if each request was in the last step and next gets one token, all with equal ends and log-prob options."""
    first = requests[0].sampling_params
    return first is not None and all(_is_decoding(r, last_scheduled, first) for r in requests)


def _is_decoding(request: Request, last_scheduled: set[str], like: SamplingParams) -> bool:
    params = request.sampling_params
    return (
        params is not None
        and request.num_tokens - request.num_computed_tokens == 1
        and request.request_id in last_scheduled
        and params.num_logprobs == like.num_logprobs
        and params.num_logprobs in (None, 0)
        and params.logprob_token_ids is None
        and _ends(params) == _ends(like)
        and not (params.repetition_detection or params.prompt_logprobs is not None)
        and not (request.mm_features or request.spec_token_ids or request.use_structured_output or request.resumable)
        and request.num_output_tokens > 0
        and request.num_in_flight_tokens == 0
        and request.prefill_stats is None
        and request.trace_headers is None
        and request.client_index == 0
    )


def _ends(params: SamplingParams) -> list[int]:
    """Tokens that end a request."""
    return [token for token in (params.eos_token_id, *(params.stop_token_ids or ())) if token is not None]
