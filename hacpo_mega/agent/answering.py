"""An agent as its answers come from it, on every rank of a cell: asked, begun ahead, gathered from the cell's engines.

Where engines have devices of their own (placement = "apart") some ranks of the cell have an engine and no actor, the
others an actor and no engine: these ask the same, answer nothing themselves, and get what the engines have answered.
Every rank of a cell calls every method with equal arguments; what a method returns is equal on all of them.
Not here: what is learnt (agent.py), what engines are asked (sampler.py).
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from hacpo_mega.agent.devices import OwnDevices
from hacpo_mega.agent.publication import Publication
from hacpo_mega.agent.sampler import Requests, Sampler
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.watchdog import RunStopped
from hacpo_mega.config import AgentConfig, Config
from hacpo_mega.config.checks.device_memory import engine_options
from hacpo_mega.config.checks.pass_through import RETURNS_ROUTING
from hacpo_mega.models.answer_ends import AnswerEnds
from hacpo_mega.records import Completion, Prompt, Rollout
from hacpo_mega.rollout.engine import Engine, require_options
from hacpo_mega.rollout.exchange import share_completions
from hacpo_mega.rollout.vllm.engine_thread import EngineThread, Generate
from hacpo_mega.samples.tokenizers import TextCodec, load_tokenizer


class Answering:
    """What of an agent asks its engines, and hands weights to them.

    engine   that this rank has a part of; None: it only trains
    """

    engine: Engine | None
    publication: Publication
    devices: OwnDevices

    def __init__(self, spec: AgentConfig, place: Place, config: Config, sampler: Callable[..., Sampler]) -> None:
        """`sampler` says what engines are asked; the others are set by who loads them."""
        require_options(spec.vllm, f"agents.{spec.name}.")
        self.name, self.index, self.place = spec.name, place.agent, place
        self.codec = TextCodec(load_tokenizer(spec.model, spec.trust_remote_code), spec.prompting)
        self._answers_per_prompt = config.answers_per_prompt
        self.num_cells = config.lanes * spec.cells_per_lane
        # Every engine of a cell takes every n-th request: neighbours, answers to one prompt, are about equally long.
        share = slice(place.coordinate.engine, None, place.rank_map.agents[place.agent].engines_per_cell)
        self.sampler = sampler(self.codec, self.index, share if place.coordinate.answers else slice(0), config)
        self.ahead = EngineThread()

    @property
    def publication_said(self) -> str:
        """What is not published shard by shard, for people; empty where there is none."""
        return f"{self.name}: {self.publication.said}" if self.publication.said else ""

    @property
    def routing_said(self) -> str:
        """Whose word on where the engine sends tokens is replayed, for people; empty where none is."""
        routing = None if self.engine is None else self.engine.routing
        return "" if routing is None else f"{self.name}: router replay, by {routing.said}"

    @property
    def ends_said(self) -> str:
        """What the chat template adds to the tokens that end answers, for people; empty where it adds none."""
        line = self.codec.added_end_line
        return f"{self.name}: {line}" if line else ""

    @property
    def asleep_bytes(self) -> int | None:
        """What was not free on this rank's device when its engine had last fallen asleep; None: it never has."""
        return self.devices.asleep_bytes

    def roll_out(
        self, prompts: Sequence[Prompt], step: int, on_answer: Callable[[Prompt, Rollout], None] | None = None
    ) -> list[Rollout]:
        """G sampled answers to each of this cell's prompts, by prompt, then by rollout, of the policy after `step`.

        `on_answer` is told of each of this rank's engine as soon as it has ended, while the others are generated.
        Afterwards the engine sleeps until `publish_weights`: its memory is the actor's to learn with.
        """
        asked = self.sampler.sampled(prompts, step)

        def told(place: int, completion: Completion) -> None:
            prompt = asked.mine[place][0]
            on_answer(prompt, self.sampler.rollout(asked.mine[place], completion))

        with self.devices.rolling_out():
            return self._answered(asked, step, on_answer=None if on_answer is None else told)

    def answer_greedily(self, prompts: Sequence[Prompt], max_tokens: int, step: int) -> list[Rollout]:
        """One most likely answer per prompt: the agent as it would be deployed after `step`."""
        with self.devices.answering():
            return self._answered(self.sampler.greedy(prompts, max_tokens), step)

    def _answered(self, asked: Requests, step: int, **options: Any) -> list[Rollout]:
        """What the engines of the cell answer, on every rank of it."""
        completions = self._call(asked, step)(**options)
        return self.sampler.rollouts(asked.places, share_completions(completions, self.place, len(asked.places)))

    def _call(self, asked: Requests, step: int) -> Generate:
        """Of this rank's engine, which must have the weights after `step`; nothing where it has none."""
        self.publication.require(step)
        return _no_answers if self.engine is None else asked.call(self.engine)

    def begin_ahead(self, prompts: Sequence[Prompt], step: int) -> None:
        """Begins the answers of a step to come, on the weights after the step before it, beside what is done meanwhile.

        Until `finish_ahead` the engine answers nothing else and takes no weights.
        """
        self.ahead.begin(self._call(self.sampler.sampled(prompts, step), step - 1))

    def finish_ahead(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Waits for them; `rollouts_of` has them as `roll_out` would. Collective over the cell."""
        if self.place.weights_group is not None:
            self.place.gather_cell(b"")  # those who train have come: what is hidden from them is counted up to here
        return share_completions(self.ahead.finish(), self.place, len(prompts) * self._answers_per_prompt)

    def rollouts_of(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Rollout]:
        """The cell's answers to `prompts`, by prompt, then by rollout, as records with their text."""
        return self.sampler.rollouts(self.sampler.places(prompts), completions)

    def publish_weights(self, step: int) -> None:
        """Megatron shards into the live vLLM engine, whose cached prefixes are forgotten; it answers with them next.

        They are those after `step`, which is asked for whenever answers are.
        """
        self.devices.publish(step)

    def verify_weights(self) -> None:
        """Compares what the engine holds, to the last bit, with what the actor would publish now.

        RunStopped, on all ranks of the cell alike, which names the first tensor that differs and the rank that has it.
        What the engine quantizes is compared with what it makes of full tensors. Else only checksums travel.
        """
        found = self.devices.differences()
        said = [f"{line} (on {self.place.coordinate})" for line in found[:1]]
        lines = [line for payload in self.place.gather_cell(json.dumps(said).encode()) for line in json.loads(payload)]
        if lines:
            raise RunStopped(f"the engine of {self.name} holds other weights than were published, first {lines[0]}")

    def close(self) -> None:
        """Shuts the engine down, while the process groups it uses still exist; what it still answers is dropped."""
        self.ahead.stop()
        if self.engine is not None:
            self.engine.close()


def _no_answers(**_how: Any) -> list[Completion]:
    return []


def load_engine(
    spec: AgentConfig, place: Place, config: Config, dtype: Any, ends: AnswerEnds, agents_on_device: int = 1
) -> Engine:
    """On random weights: reading the folder twice would double the start of a large model."""
    with place.spans.span("engine"):
        return Engine(
            spec.model,
            max_model_len=config.rollout.max_prompt_tokens + config.longest_answer,
            dtype=dtype,
            tensor_parallel_size=spec.engine_tensor_parallel,
            seed=config.seed,
            trust_remote_code=spec.trust_remote_code,
            eos_ids=ends.ids,
            random_weights=True,
            agents_on_device=agents_on_device,
            timeout_s=config.wait_s,
            options=engine_options(config, spec) | ({RETURNS_ROUTING: True} if spec.router_replay else {}),
            on_progress=place.progress,
        )
