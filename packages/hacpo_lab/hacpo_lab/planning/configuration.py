"""A configuration as the planner reads it, and the work that a step of it asks of an agent.

Models are given by folder, by init table or by a public name. Not checked here: prompt files, tokenizers, weights, the
run folder, all of which are on the machines that will run it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hacpo_lab.planning.cluster_file import Cluster
from hacpo_mega.config import Config
from hacpo_mega.config.checks.checks import batch_problems, named_models
from hacpo_mega.config.checks.input_checks import code_problems
from hacpo_mega.config.load import load_unchecked
from hacpo_mega.models.families.architecture import Architecture


@dataclass(frozen=True)
class Planned:
    """A configuration whose devices have the memory of the cluster's, and the model of every agent by name."""

    config: Config
    models: dict[str, Architecture]


def load_planned(file: Path, overrides: Sequence[str], cluster: Cluster) -> Planned:
    """The configuration for a cluster. ValueError with one line per problem: keys, batches, unknown names, layouts."""
    config = load_unchecked(file, tuple(overrides))
    config = config.model_copy(update={"device_memory_gib": cluster.device.memory_gib})
    problems = [*batch_problems(config), *code_problems(config, reads_files=False)]
    if config.placement == "shared":
        problems.append("placement: agents that take turns on devices are not planned for. Nearest: placement=split")
    if config.placement == "apart":
        problems.append(
            "placement: engines on devices of their own are not planned for. `check` says what both kinds of device "
            "hold; the plan of placement=split has the seconds of roll_out, which engines of as many devices take, "
            "beside those of the rest, which the others do: one step off, the longer of both is a step. Nearest: "
            "placement=split"
        )
    if config.rollout.one_step_off:
        problems.append("rollout.one_step_off: steps that overlap are not planned for. Nearest: one_step_off=false")
    models, wrong = named_models(config)
    if problems := [*problems, *wrong]:
        raise ValueError("\n".join(f"{file}: {problem}" for problem in problems))
    return Planned(config, models)


@dataclass(frozen=True)
class Work:
    """One agent's step, all its cells together.

    answers         it samples                          pool      answers of all agents to the same prompts
    scored          of them before its first update     trained   answers it learns from
    updates         optimizer updates                   scored_updates   those whose answers are scored before
    sources         agents it learns from, itself among them
    prompt_tokens, answer_tokens   of a prompt and an answer, on average; an answer may be a conversation
    longest         own tokens of the longest answer, which the slowest engine waits for
    turns           own turns of an answer, on average; 1 without conversations
    others_tokens   of the answer's tokens those that others say between own turns, on average
    environment_s   seconds from an own turn to the next, on average
    """

    prompts: int
    answers: float
    pool: float
    trained: float
    updates: int
    sources: int
    scored_updates: int
    prompt_tokens: float
    answer_tokens: float
    longest: float
    turns: float = 1.0
    others_tokens: float = 0.0
    environment_s: float = 0.0

    @property
    def own_tokens(self) -> float:
        """Tokens of an answer that its agent samples, on average."""
        return self.answer_tokens - self.others_tokens

    @property
    def scored(self) -> float:
        """Answers whose score does not come from the update that trains them (training.score_in_first_update)."""
        return self.answers * self.scored_updates / self.updates

    @property
    def length(self) -> float:
        """Tokens of a prompt and its answer that the model reads: all but the last, after which nothing is predicted.

        A prompt counts for each of its answers, though training.share_prompts reads it once where the actor can: the
        rates of `cpu` are measured by this count, and for GPUs it is not known which layers will be installed.
        """
        return self.prompt_tokens + self.answer_tokens - 1


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and an answer, on average; None: half of the longest that the configuration allows.

    In a conversation `answer_tokens` are those of an own turn, of which there are `turns`, and others say
    `others_tokens` and take `environment_s` seconds between two of them.
    """

    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    turns: float | None = None
    others_tokens: float | None = None
    environment_s: float = 0.0


def work_of(config: Config, lengths: Lengths) -> Work:
    """The work that a step asks of each agent. ValueError for lengths that the configuration does not allow."""
    rollout, num_agents = config.rollout, len(config.agents)
    limits = (("prompt", lengths.prompt_tokens, rollout.max_prompt_tokens),
              ("answer", lengths.answer_tokens, rollout.max_answer_tokens))  # fmt: skip
    for what, tokens, most in limits:
        if tokens is not None and not 1 <= tokens <= most:
            raise ValueError(
                f"--{what}-tokens ({tokens}) must be 1 to rollout.max_{what}_tokens ({most}). "
                f"Nearest: {min(max(tokens, 1), most)}"
            )
    answer = lengths.answer_tokens or -(-rollout.max_answer_tokens // 2)
    prompts = config.training.prompts_per_step
    answers = prompts * config.answers_per_prompt
    sources = num_agents if config.algorithm.shares_answers else 1
    return Work(
        prompts=prompts,
        answers=answers,
        pool=answers * num_agents,
        trained=answers * sources,
        updates=config.updates_per_step,
        sources=sources,
        scored_updates=0 if config.engine_scores else config.updates_per_step - config.scores_in_first_update,
        prompt_tokens=lengths.prompt_tokens or -(-rollout.max_prompt_tokens // 2),
        **_answer_numbers(config, lengths, answer),
    )


def _answer_numbers(config: Config, lengths: Lengths, turn_tokens: int) -> dict[str, float]:
    """The numbers of `Work` about an answer of one turn or of several. ValueError for impossible lengths."""
    conversation, most = config.conversation, config.rollout.max_answer_tokens
    if conversation.environment is None and not config.roles:
        if given := [name for name in ("turns", "others_tokens", "environment_s") if getattr(lengths, name)]:
            raise ValueError(f"--{given[0].replace('_', '-')}: the run has no conversation.environment; leave it out")
        return {"answer_tokens": turn_tokens, "longest": most}
    turns = lengths.turns or (1 + conversation.max_turns) / 2
    if not 1 <= turns <= conversation.max_turns:
        raise ValueError(f"--turns ({turns:g}) must be 1 to conversation.max_turns ({conversation.max_turns})")
    longest, own = conversation.longest(most), turns * turn_tokens
    others = lengths.others_tokens
    between = max(0.0, longest / 2 - own) if others is None else (turns - 1) * others
    if own + between > longest:
        raise ValueError(
            f"conversations of {own + between:g} tokens on average ({turns:g} own turns of {turn_tokens}, {between:g} "
            f"of others) exceed the longest one, {longest}: give a lower --turns, --answer-tokens or --others-tokens"
        )
    return {
        **{"answer_tokens": own + between, "others_tokens": between, "turns": turns},
        **{"longest": min(longest, conversation.max_turns * most), "environment_s": lengths.environment_s},
    }
