"""Engine loop: turns of many conversations join and leave one running vLLM, with no barrier between them.

The first rank of an engine asks a `TurnSource` before every step; one message a step tells the other ranks of the
engine what joins and what is aborted, so all of them schedule the same. A turn's prompt is its whole conversation so
far; vLLM's prefix cache holds the part that it has read already.

Bits: a token is a function of logits, seed and position (vllm/row_noise.py), but some layers round a lone row
differently from one of several (`odd_row_counts`). Where a model has such a layer, a companion joins a lone turn, so
that the time at which a request arrives changes no bit. Layers that round in more than these two ways, and CUDA, have
no such guarantee.

Elsewhere: sources of turns (hacpo_mega/conversations), when an engine is awake (agent/devices.py).
"""

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.distributed as dist
from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason

from hacpo_mega.cluster.groups.tree import join, share_bytes, split
from hacpo_mega.records import Completion, Stop
from hacpo_mega.rollout.cpu.decode_scheduler import DecodeScheduler
from hacpo_mega.rollout.vllm.engine_stream_guard import finish_steps
from hacpo_mega.rollout.vllm.routing import Routing

STOPS = {"stop": Stop.EOS, "length": Stop.LENGTH}
COMPANION = "\0companion"  # key of the request that keeps a lone turn company
# Row counts of a step, compared with the largest: each side of the blocks that matrix products are cut into.
NUM_ROWS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 32, 33, 36, 37, 48, 64, 65, 100, 128, 200, 256)


@dataclass(frozen=True)
class TurnRequest:
    """One turn to be sampled.

    key             conversation and turn; unique while it runs
    prompt_ids      all tokens of the conversation so far
    seed            of the turn's noise, in [0, 2^63)
    temperature     0 is greedy
    """

    key: str
    prompt_ids: Sequence[int]
    seed: int
    max_tokens: int
    temperature: float = 1.0
    return_logprobs: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed {self.seed} must lie in [0, 2^63)")
        if not 0.0 <= self.temperature <= 100.0:  # also not a number
            raise ValueError(f"temperature {self.temperature} must lie in [0, 100]")

    def sampling(self, eos_ids: Sequence[int], min_tokens: int = 0) -> SamplingParams:
        """vLLM's parameters, of Engine.generate too, so that all requests take the scheduler's fast path."""
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=list(eos_ids),
            logprobs=0 if self.return_logprobs else None,
            flat_logprobs=True,
            detokenize=False,
            skip_clone=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


@dataclass(frozen=True)
class TurnLimits:
    """Bounds of what an engine takes: an id outside the vocabulary would kill it."""

    vocabulary: int
    max_model_len: int

    def require(self, request: TurnRequest) -> None:
        """ValueError, one line, for a turn that the engine cannot answer."""
        num_ids, room = len(request.prompt_ids), self.max_model_len - len(request.prompt_ids)
        if not num_ids or request.max_tokens < 1 or request.max_tokens > room:
            raise ValueError(
                f"turn {request.key}: {num_ids} tokens and max_tokens {request.max_tokens}; the engine takes at least "
                f"1 of each and at most {self.max_model_len} together"
            )
        lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
        if lowest < 0 or highest >= self.vocabulary:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"turn {request.key}: token id {wrong} is none of the model's {self.vocabulary}")


class TurnSource(Protocol):
    """Source of turns. The engine's thread calls it, on the first rank of the engine alone."""

    def take(self, idle: bool) -> tuple[list[TurnRequest], list[str]]:
        """New turns, and keys to abort; `idle`: the engine has nothing to do, and this may wait up to .05 s."""

    def give(self, key: str, completion: Completion) -> None:
        """Called as soon as a turn has ended; an aborted one ends with Stop.CUT and the tokens that it has."""

    def fail(self, error: BaseException) -> None:
        """Called when the loop dies: no turn that runs or waits will be answered."""

    @property
    def is_done(self) -> bool:
        """True if no conversation is left anywhere."""


@dataclass
class ServeTally:
    """Counts of one `Engine.serve`: turns, tokens, prompt tokens that were cached, steps, and seconds.

    step_s, idle_s   seconds in the engine's steps, and in waiting for a turn while it had nothing to do
    """

    num_turns: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    step_s: float = 0.0
    idle_s: float = 0.0


@dataclass(frozen=True)
class _Message:
    """Message of the first rank to the others of its engine before a step."""

    added: Sequence[TurnRequest] = ()
    aborted: Sequence[str] = ()
    ends: bool = False
    error: str = ""

    def packed(self) -> bytes:
        if self == _Message():
            return b""
        heads = [asdict(replace(request, prompt_ids=())) for request in self.added]
        ids = [np.asarray(request.prompt_ids, np.int32).tobytes() for request in self.added]
        return join([json.dumps([heads, list(self.aborted), self.ends, self.error]).encode(), *ids])

    @classmethod
    def unpacked(cls, message: bytes) -> Self:
        if not message:
            return cls()
        first, *ids = split(message)
        heads, aborted, ends, error = json.loads(first)
        prompts = [np.frombuffer(one, np.int32).tolist() for one in ids]
        added = [TurnRequest(**head | {"prompt_ids": prompt}) for head, prompt in zip(heads, prompts, strict=True)]
        return cls(added, aborted, ends, error)


class EngineLoop:
    """One run of the loop over a vLLM that has no request. All ranks of the engine run it together."""

    def __init__(
        self,
        llm: LLM,
        source: TurnSource | None,
        *,
        group: dist.ProcessGroup | None,
        limits: TurnLimits,
        eos_ids: Sequence[int],
        routing: Routing | None,
        needs_companion: bool,
        on_progress: Callable[[], None],
    ) -> None:
        """Serves `source`, which only the first rank of `group` needs (None: an engine of one rank)."""
        self._llm, self._source, self._group = llm, source, group
        self._limits, self._eos_ids, self._routing = limits, eos_ids, routing
        self._needs_companion, self._on_progress = needs_companion, on_progress
        self._is_first = group is None or group.rank() == 0
        self._running: dict[str, TurnRequest] = {}  # by vLLM's request id
        self._request_ids: dict[str, str] = {}  # vLLM's request ids, by key
        self._has_failed = False  # afterwards the source is given no answer
        self._error: Exception | None = None  # of the source
        self.tally = ServeTally()

    def run(self) -> ServeTally:
        """Steps until the source is done. An error that ends it is reported to the source, and raised."""
        try:
            while not (message := self._agree()).ends:
                self._on_progress()
                if message.error:
                    raise RuntimeError(f"the first rank of this engine has ended its loop: {message.error}")
                for request in message.added:
                    self._add(request)
                self._abort(message.aborted)
                if self._running:
                    self._step()
        except BaseException as error:
            self._has_failed = True
            if self._is_first:
                self._source.fail(error)
            raise
        finally:
            self._abort(list(self._request_ids))
            finish_steps(self._llm)
        return self.tally

    def _agree(self) -> _Message:
        """The first rank's next message, on all ranks of the engine."""
        if not self._is_first:
            return _Message.unpacked(share_bytes(self._group, None))
        try:
            message = self._next_message()
        except BaseException as error:
            self._share(_Message(error=f"{type(error).__name__}: {error}"))
            raise
        self._share(message)
        return message

    def _share(self, message: _Message) -> None:
        if self._group is not None:
            share_bytes(self._group, message.packed())

    def _next_message(self) -> _Message:
        if self._error is not None:
            raise self._error
        start, is_idle = time.monotonic(), not self._running
        added, aborted = self._source.take(is_idle)
        if is_idle:
            self.tally.idle_s += time.monotonic() - start
        if self._source.is_done and not added:
            return _Message(ends=True)
        if self._needs_companion:
            return _Message(*self._accompanied(added, aborted))
        return _Message(added, aborted)

    def _accompanied(self, added: list[TurnRequest], aborted: list[str]) -> tuple[list[TurnRequest], list[str]]:
        """Adds a companion to a lone turn, and ends it when no turn is left."""
        ignored = {COMPANION, *aborted}
        turns = [request for request in (*self._running.values(), *added) if request.key not in ignored]
        has_companion = COMPANION in self._request_ids
        if len(turns) == 1 and not has_companion:
            room = self._limits.max_model_len - 2
            companion = replace(turns[0], key=COMPANION, prompt_ids=(0, 0), seed=0, max_tokens=room)
            return [companion, *added], aborted  # first, so that a long prompt leaves room for its row
        return added, [*aborted, COMPANION] if has_companion and not turns else aborted

    def _add(self, request: TurnRequest) -> None:
        self._limits.require(request)
        assert request.key not in self._request_ids, f"turn {request.key} runs already"
        request_id = str(next(self._llm.request_counter))
        prompt = {"prompt_token_ids": list(request.prompt_ids)}
        self._llm.llm_engine.add_request(request_id, prompt, request.sampling(self._eos_ids))
        self._running[request_id], self._request_ids[request.key] = request, request_id

    def _abort(self, keys: Collection[str]) -> None:
        if request_ids := {self._request_ids[key] for key in keys if key in self._request_ids}:
            cut_requests(self._llm, partial(self._end, was_cut=True), request_ids)

    def _step(self) -> None:
        start = time.monotonic()
        outputs = self._llm.llm_engine.step()
        self.tally.step_s += time.monotonic() - start
        self.tally.num_steps += 1
        self._end(outputs)

    def _end(self, outputs: list[RequestOutput], *, was_cut: bool = False) -> None:
        for output in outputs:
            request = self._running.pop(output.request_id)
            del self._request_ids[request.key]
            if request.key == COMPANION:
                continue
            routing = None if self._routing is None or not request.return_logprobs else self._routing.of(output)
            completion = completion_of(output, was_cut=was_cut, routing=routing)
            self.tally.num_turns += 1
            self.tally.num_prompt_tokens += len(output.prompt_token_ids)
            self.tally.num_cached_tokens += output.num_cached_tokens or 0
            self.tally.num_tokens += len(completion.token_ids)
            if self._is_first and not self._has_failed:
                self._give(request.key, completion)

    def _give(self, key: str, completion: Completion) -> None:
        try:
            self._source.give(key, completion)
        except Exception as error:  # raised before the next step, where the other ranks hear of it
            self._error = self._error or error


def of_first_rank(is_unwanted: Callable[[], bool], num_ranks: int) -> Callable[[], bool]:
    """`is_unwanted` as the first of an engine's `num_ranks` answers it, on each of them: all cut after the same step.

    Collective over the engine.
    """
    if num_ranks == 1:
        return is_unwanted
    group = parallel_state.get_tp_group().cpu_group
    return lambda: share_bytes(group, b"1" if is_unwanted() else b"") == b"1"


def cut_requests(
    llm: LLM, before: Callable[[list[RequestOutput]], None], request_ids: Collection[str] | None = None
) -> list[RequestOutput]:
    """Ends running requests, with the tokens that they have; vLLM's own abort returns no output for them.

    before        called with their outputs while vLLM still knows the requests
    request_ids   those with which the requests were added; None: all
    """
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    if isinstance(scheduler, DecodeScheduler):
        engine.output_processor.process_outputs(scheduler.take_held())
    engine.output_processor.process_outputs.flush()
    states = [
        state
        for state in engine.output_processor.request_states.values()
        if request_ids is None or state.external_req_id in request_ids
    ]
    outputs = [state.make_request_output([], None, FinishReason.ABORT, None) for state in states]
    before(outputs)
    engine.abort_request([state.request_id for state in states], internal=True)
    return outputs


def completion_of(output: RequestOutput, *, was_cut: bool, routing: np.ndarray | None) -> Completion:
    """Converts a vLLM answer to our record. Its finish_reason is "stop" exactly when an end token was sampled."""
    answer = output.outputs[0]
    # vLLM's "abort" means both an answer that was cut here and one that it gave up by itself.
    stop = Stop.CUT if was_cut else STOPS.get(answer.finish_reason, Stop.ABORT)
    logprobs = None if answer.logprobs is None else np.asarray(answer.logprobs.logprobs, dtype=np.float32)
    return Completion(np.asarray(answer.token_ids, dtype=np.int32), stop, logprobs, routing)


def odd_row_counts(model: torch.nn.Module) -> set[int] | None:
    """Numbers of rows with which a linear layer of a CPU engine rounds differently than with the largest of NUM_ROWS.

    Measured on this processor, for every shape of the model's layers. Empty: the number of rows in a step changes no
    bit. {1}: a lone row is rounded differently. None with experts: each has rows of its own, and a companion may go to
    others.
    """
    layers: dict[tuple[Any, ...], tuple[Any, int]] = {}
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, FusedMoEMethodBase):
            return None
        if isinstance(method, UnquantizedLinearMethod) and not hasattr(layer, "cpu_linear"):
            continue  # a delta net's convolution: a kernel of its own reads its weight, and nothing is multiplied
        if isinstance(layer, LinearBase):
            width = getattr(layer, "input_size_per_partition", layer.input_size)
        elif isinstance(layer, ParallelLMHead):
            width = layer.embedding_dim
        else:
            continue
        layers.setdefault((type(layer), width, getattr(layer, "output_size_per_partition", 0)), (layer, width))
    dtype = next(model.parameters()).dtype
    products = ((partial(layer.quant_method.apply, layer), width) for layer, width in layers.values())
    return set().union(*(_odd_rows(product, width, dtype) for product, width in products))


def odd_row_counts_of(shapes: Collection[tuple[int, int]], dtype: torch.dtype) -> set[int]:
    """`odd_row_counts` for layers of these shapes, [outputs, inputs] of a rank, before there is a model."""
    odd: set[int] = set()
    for shape in shapes:
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(torch.randn(shape, dtype=dtype), requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        odd |= _odd_rows(lambda rows_RD, of=layer: of.cpu_linear(rows_RD, of.weight, None), shape[1], dtype)
    return odd


def _odd_rows(product: Callable[[torch.Tensor], torch.Tensor], width: int, dtype: torch.dtype) -> set[int]:
    rows_RD = torch.randn(NUM_ROWS[-1], width, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        expected_RO = product(rows_RD)
        return {n for n in NUM_ROWS if not torch.equal(product(rows_RD[:n]), expected_RO[:n])}


def order_of_arrival(odd_rows: set[int] | None) -> str:
    """Clause for the user: whether the order in which turns arrive may change bits (`odd_row_counts`)."""
    if odd_rows is None:
        return "the order of arrival may change rounding"
    if odd_rows <= {1}:
        return "the order of arrival changes no bit"
    return f"the order of arrival may change rounding (steps of {', '.join(map(str, sorted(odd_rows)))} rows differ)"
