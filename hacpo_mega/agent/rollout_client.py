"""Rollout side of an agent: submits requests, prefetches, gathers completions, syncs weights to the engines.

With placement = "apart" a rank of the cell has either an engine or an actor. The training ranks make the same requests,
generate nothing themselves, and receive the engines' answers.
All ranks of a cell call every method with equal arguments and get equal results.

Elsewhere: learning (agent.py), generation requests (sampler.py).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hacpo_mega.agent.devices import Devices, device_policy
from hacpo_mega.agent.sampler import Requests, Sampler
from hacpo_mega.agent.weight_sync import WeightSync
from hacpo_mega.cluster.machine.device import actor_dtype
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.turns import agents_per_device, in_turn, require_host_memory
from hacpo_mega.cluster.watchdog import RunStopped
from hacpo_mega.config import AgentConfig, Config
from hacpo_mega.config.checks.device_memory import engine_options
from hacpo_mega.config.checks.pass_through import RETURNS_ROUTING
from hacpo_mega.conversations.environment import EnvironmentClass
from hacpo_mega.conversations.partners import Partners
from hacpo_mega.conversations.player import Player, PlayLimits, environment_of, turn_format
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.megatron.train.optimizer import ActorOffload
from hacpo_mega.memory.budget import Budget
from hacpo_mega.records import Completion, Prompt, Rollout
from hacpo_mega.rollout.engine import Engine, require_options
from hacpo_mega.rollout.exchange import share_completions
from hacpo_mega.rollout.vllm.engine_spec import EngineSpec
from hacpo_mega.rollout.vllm.engine_thread import EngineThread, Generate
from hacpo_mega.samples.tokenizers import TextCodec, load_tokenizer

SEATS = "seats"  # name of the listeners through which agents request others' turns


class RolloutClient:
    """Rollout side of an agent: generates answers and syncs weights to its vLLM engines.

    An agent owns one; a rank that only generates has one alone. Its answers depend on the run's seed and the weights.

    codec                  the agent's tokenizer
    engine                 this rank's engine; None on a rank that only trains
    turn_format, player    tokens of other turns, and the driver of conversations; None without an environment
    environment_rewards    whether the environment gives the rewards, of any size, in place of the grader
    prefetcher             thread in which the engine answers for a later step
    dtype                  of the actor's parameters
    devices, weight_sync   of this rank; start-up leaves the engine ready to answer
    """

    def __init__(
        self,
        spec: AgentConfig,
        place: Place,
        config: Config,
        actor: Actor | None,
        *,
        step: int,
        agents_on_device: int,
        budget: Budget | None = None,
        sampler: Callable[..., Sampler] = Sampler,
    ) -> None:
        """Starts the engine, if this rank has one, and syncs the weights after `step` to it. Collective over the job.

        `actor` is this rank's, and `budget` its device's; both None on a rank that only generates. `agents_on_device`
        agents (`require_fit`) start their engines one after another. `sampler` makes the generation requests.
        """
        self.name, self.index, self.place = spec.name, place.agent, place
        environment = environment_of(config.conversation, has_roles=bool(config.roles))
        self.codec, self._has_conversations = _codec(spec, environment), environment is not None
        self.environment_rewards = environment is not None and environment.rewards
        self.turn_format, self.player = None, None
        if environment is not None:
            self.turn_format = turn_format(self.codec, environment, has_roles=bool(config.roles))
            if place.coordinate.is_engine_leader:  # one rank drives the conversations of its whole engine
                # The player's thread has a tokenizer of its own: tokenizers are not thread-safe.
                partners = _partners(place, config)
                self.player = Player(environment, _codec(spec, environment), PlayLimits.of(config), partners)
                if partners is not None and not partners.drives:
                    self.player.serve_seats(place.open_listener(SEATS))
        has_engine = place.coordinate.answers
        self._answers_per_prompt = config.answers_per_prompt
        policy = device_policy(config.mode)
        # Every engine of a cell takes every n-th request: neighbours, answers to one prompt, are about equally long.
        share = slice(place.coordinate.engine, None, place.rank_map.agents[place.agent].engines_per_cell)
        self.sampler = sampler(self.codec, self.index, share if has_engine else slice(0), config)
        self.prefetcher = EngineThread()
        self.dtype = actor_dtype(place.device, spec.dtype) if actor is None else actor.model.config.params_dtype
        actor_offload = ActorOffload(actor.model, actor.optimizer) if policy.takes_turns else None
        if actor_offload is not None:
            actor_offload.offload()
        with in_turn(place, agents_on_device > 1):
            self.engine = self._load_engine(spec, config, agents_on_device, budget) if has_engine else None
            with place.spans.span("weights"):
                self.weight_sync = WeightSync(place, actor, self.engine)
                self.devices = Devices(policy, place, actor, actor_offload, self.engine, self.weight_sync)
                self.publish_weights(step)

    @property
    def summaries(self) -> tuple[str, str, str]:
        """Lines for the startup log, "" without one: on end tokens that the chat template adds, on tensors that are
        synced whole instead of shard by shard, and on the source of the replayed routing.
        """
        routing = None if self.engine is None else self.engine.routing
        replay = "" if routing is None else f"router replay, by {routing.summary}"
        lines = self.codec.added_end_line or "", self.weight_sync.summary, replay
        return tuple(line and f"{self.name}: {line}" for line in lines)

    def roll_out(
        self, prompts: Sequence[Prompt], step: int, on_answer: Callable[[Prompt, Rollout], None] | None = None
    ) -> list[Rollout]:
        """G sampled answers to each of this cell's prompts, by prompt, then by rollout, from the policy after `step`.

        `on_answer` is called for each answer of this rank's engine as soon as it ends, while others are still
        generated.
        Afterwards the engine sleeps until `publish_weights`: the actor needs its memory to learn.
        """
        requests = self.sampler.rollout_requests(prompts, step)
        texts: dict[tuple[int, int], str] = {}

        def answer_ended(number: int, completion: Completion) -> None:
            prompt, g = requests.mine[number]
            rollout = self.sampler.rollout(requests.mine[number], completion)
            texts[prompt.index, g] = rollout.text
            on_answer(prompt, rollout)

        with self.devices.answering(then_learns=True):
            return self._generate(requests, step, texts, on_answer=None if on_answer is None else answer_ended)

    def answer_once(
        self, prompts: Sequence[Prompt], max_tokens: int, step: int, temperature: float = 0.0
    ) -> list[Rollout]:
        """One answer per prompt from the policy after `step`, as a deployed model would give; temperature 0: greedy."""
        with self.devices.answering():
            return self._generate(self.sampler.single_requests(prompts, max_tokens, temperature), step, {})

    def _generate(
        self, requests: Requests, step: int, texts: Mapping[tuple[int, int], str], **options: Any
    ) -> list[Rollout]:
        """Answers of all engines of the cell, on every rank of the cell.

        `texts` has those that an `on_answer` of the `options` has decoded, by prompt index and rollout index.
        """
        completions = self._engine_call(requests, step)(**options)
        return self.sampler.rollouts(requests.slots, self._gathered(completions, len(requests.slots)), texts)

    def _engine_call(self, requests: Requests, step: int) -> Generate:
        """The call of this rank's engine, which must have the weights after `step`; a no-op without an engine."""
        self.weight_sync.require_step(step)
        if self.engine is None:
            return lambda **_options: []
        if self._has_conversations and self.player is None:
            return partial(_follow, self.engine)
        return requests.engine_call(self.engine, self.player)

    def begin_prefetch(self, prompts: Sequence[Prompt], step: int) -> None:
        """Begins to generate answers for a later step in the background, with the weights after the step before it.

        Until `finish_prefetch` the engine answers nothing else and takes no weights.
        """
        self.prefetcher.begin(self._engine_call(self.sampler.rollout_requests(prompts, step), step - 1))

    def finish_prefetch(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Waits for the prefetched answers of the cell; `sampler` makes rollouts of them. Collective over the cell."""
        if self.place.weights_group is not None:
            self.place.gather_cell(b"")  # barrier with the training ranks, so that `roll_out_hidden_s` ends here
        return self._gathered(self.prefetcher.finish(), len(prompts) * self._answers_per_prompt)

    def _gathered(self, mine: Sequence[Completion], num_requests: int) -> list[Completion]:
        """Answers of all engines of the cell; only an engine's first rank has those of conversations."""
        return share_completions(mine, self.place, num_requests, first_has_all=self._has_conversations)

    def publish_weights(self, step: int) -> None:
        """Syncs the actor's weights after `step` into the live vLLM engine, and clears its prefix cache.

        Every later generation call checks that the engine has the weights of the step that it asks for.
        """
        self.devices.publish(step)

    def verify_weights(self) -> None:
        """Compares the engine's weights bit for bit with the actor's.

        RunStopped, on all ranks of the cell, names the first tensor that differs and the rank that holds it.
        Quantized tensors are compared with a fresh quantization of the full tensors. All others are compared by
        checksum.
        """
        mine = [f"{line} (on {self.place.coordinate})" for line in self.devices.differences()[:1]]
        lines = [line for payload in self.place.gather_cell(json.dumps(mine).encode()) for line in json.loads(payload)]
        if lines:
            raise RunStopped(f"the engine of {self.name} holds other weights than were published, first {lines[0]}")

    def close(self) -> None:
        """Shuts the engine down while its process groups still exist; unfinished answers are dropped."""
        self.prefetcher.stop()
        if self.player is not None:
            self.player.close()
        if self.engine is not None:
            self.engine.close()

    def _load_engine(self, spec: AgentConfig, config: Config, agents_on_device: int, budget: Budget | None) -> Engine:
        """Starts an engine with random weights, which the first sync replaces: the actor alone reads the folder."""
        options = engine_options(config, spec, budget if agents_on_device == 1 else None)
        settings = EngineSpec(
            spec.model,
            max_model_len=config.rollout.max_prompt_tokens + config.longest_answer,
            dtype=self.dtype,
            tensor_parallel_size=spec.engine_tensor_parallel,
            seed=config.seed,
            trust_remote_code=spec.trust_remote_code,
            eos_ids=self.codec.ends.ids if self.turn_format is None else self.turn_format.stop_ids,
            random_weights=True,
            can_sleep=device_policy(config.mode).engine_sleeps,
            agents_on_device=agents_on_device,
            timeout_s=config.wait_s,
            options=options | ({RETURNS_ROUTING: True} if spec.router_replay else {}),
        )
        with self.place.spans.span("engine"):
            return Engine(settings, on_progress=self.place.progress)


def require_fit(spec: AgentConfig, place: Place, config: Config, pinned: int = 0, copied: int = 0) -> int:
    """Number of agents that start an engine on one device one after another; 1 where agents take turns on it.

    ValueError, before anything is loaded, if this rank's engine options, host memory or device do not fit.
    `pinned` and `copied` are bytes of host memory for offloaded state and for copies that checkpoints are written from.
    Collective over the job.
    """
    require_options(spec.vllm, f"agents.{spec.name}.")
    require_host_memory(place, pinned, copied)
    agents_on_device = agents_per_device(place)
    return 1 if config.mode.takes_turns else agents_on_device


def _codec(spec: AgentConfig, environment: EnvironmentClass | None) -> TextCodec:
    tools = () if environment is None else environment.tools
    return TextCodec(load_tokenizer(spec.model, spec.trust_remote_code), spec.prompting, tools)


def _partners(place: Place, config: Config) -> Partners | None:
    """Roles of conversations between agents, and the ranks of their engines; None where each agent plays alone."""
    if not config.roles:
        return None
    index = {agent.name: number for number, agent in enumerate(config.agents)}
    agents = [index[role.agent] for role in config.roles]
    rank_map, me = place.rank_map, place.coordinate

    def seat_rank(role: int, number: int, is_greedy: bool) -> int:
        per_prompt = 1 if is_greedy else config.answers_per_prompt
        return rank_map.engine_with(agents[role], me, number, per_prompt, in_lane=not is_greedy)

    return Partners(
        tuple(role.name for role in config.roles),
        agents.index(place.agent),
        partial(place.connect, name=SEATS, timeout_s=config.wait_s),
        seat_rank,
        lambda rank: str(rank_map.coordinate(rank)),
        config.wait_s,
    )


def _follow(engine: Engine, **_options: Any) -> list[Completion]:
    """Generates, on another rank of an engine, the turns that its first rank requests; returns no answers."""
    engine.serve(None)
    return []
