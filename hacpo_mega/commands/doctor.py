"""`hacpo-mega doctor`: whether Megatron, Hugging Face and the live vLLM engine compute the same model in this layout.

For every agent of a configuration, log-probs of the same tokens are compared: Megatron with Hugging Face, Megatron with
the engine after its weights were published, and again after an optimizer update. That update is large on purpose: a
publish that changes nothing must not pass. Nothing is written; the updated models are discarded.
Not covered: whether training improves anything.
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils.logging import disable_progress_bar

from hacpo_mega.agent.agent import Agent
from hacpo_mega.cluster.machine.environment import compiler_problems
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import AgentConfig, Config, OptimizerConfig
from hacpo_mega.models.files.folder import has_tower
from hacpo_mega.models.files.visible import say
from hacpo_mega.records import TokenSequence
from hacpo_mega.rollout.vllm.row_noise import answer_seed

# Difference of a token's log-prob (nats), and the share of tokens that must be within it. bf16 keeps 8 bits of a weight
# and of a logit, so that one of thousands of tokens may differ by much in a sound model.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.5}
SHARE_WITHIN = {torch.float32: 1.0, torch.bfloat16: 0.99}


@dataclass(frozen=True)
class Finding:
    """One comparison of log-probs of the same tokens, on one rank.

    `within`, the difference (nats) that SHARE_WITHIN of the tokens stay below, must not exceed `bound`; with
    `must_differ` the largest difference must exceed it.
    """

    agent: str
    comparison: str
    dtype: str
    num_tokens: int
    largest: float
    within: float
    mean: float
    bound: float
    must_differ: bool = False

    @property
    def is_good(self) -> bool:
        """False for a NaN, too."""
        return self.largest > self.bound if self.must_differ else self.within <= self.bound


def finding_of(
    agent: str, comparison: str, dtype: torch.dtype, difference_T: np.ndarray, bound: float, must_differ: bool = False
) -> Finding:
    """The finding of the differences (nats, absolute) of T tokens' log-probs in an actor of `dtype`."""
    return Finding(
        agent,
        comparison,
        str(dtype).removeprefix("torch."),
        len(difference_T),
        float(difference_T.max()),
        float(np.quantile(difference_T, SHARE_WITHIN[dtype])),
        float(difference_T.mean()),
        bound,
        must_differ,
    )


def worst_of(findings: Sequence[Finding]) -> list[Finding]:
    """One finding per agent and comparison: the worst rank's."""
    worst: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        known = worst.get((finding.agent, finding.comparison))
        if known is None or _badness(finding) > _badness(known):
            worst[finding.agent, finding.comparison] = finding
    return list(worst.values())


def _badness(finding: Finding) -> float:
    if np.isnan(finding.largest):
        return np.inf
    return -finding.largest if finding.must_differ else finding.within


def table(findings: Sequence[Finding]) -> str:
    """The findings as text, a line each."""
    columns = f"{'tokens':>7} {'largest':>9} {'within':>9} {'mean':>9}  bound"
    head = f"{'agent':16} {'log-probs (nats)':32} {'dtype':9} {columns}"
    return "\n".join([head, *map(_line, findings)])


def _line(finding: Finding) -> str:
    numbers = f"{finding.num_tokens:7d} {finding.largest:9.2e} {finding.within:9.2e} {finding.mean:9.2e}"
    verdict = f"{'>' if finding.must_differ else '<='} {finding.bound:g}  {'ok' if finding.is_good else 'BAD'}"
    return f"{finding.agent:16} {finding.comparison:32} {finding.dtype:9} {numbers}  {verdict}"


NUM_ANSWERS = 8
PROMPT_TOKENS = 16
LONGEST = 1024
# One Adam step of this size moves every weight by about as much: far more than any tolerance.
UPDATE = OptimizerConfig(lr=1e-3)


def examine(config: Config, tolerance: float | None = None) -> bool:
    """Compares every agent of `config` and prints a table on rank 0; True if all findings are good.

    `tolerance` bounds the difference of SHARE_WITHIN of the tokens' log-probs (nats); None takes TOLERANCES of the
    actor's dtype. Collective over the job, whose ranks must be those of the configuration. ValueError on a GPU node
    without the compiler that Triton needs.
    """
    if torch.cuda.is_available() and (problems := compiler_problems()):
        raise ValueError("; ".join(problems))
    with Place.join(RankMap.of(config), config.wait_s, config.stall_s) as place:
        place.enter_phase("doctor", "before any step")
        mine = json.dumps([asdict(finding) for finding in diagnose(config, place, tolerance)]).encode()
        payloads = place.gather_job(mine)
        findings = worst_of([Finding(**fields) for payload in payloads for fields in json.loads(payload)])
        if place.coordinate.global_rank == 0:
            say(table(findings))
    return all(finding.is_good for finding in findings)


def diagnose(config: Config, place: Place, tolerance: float | None = None) -> list[Finding]:
    """This rank's findings about its agent. Collective over the agent's ranks."""
    spec = config.agents[place.agent].model_copy(update={"optimizer": UPDATE})
    # At temperature 1 all three compute the same distribution of the next token.
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": 1.0})})
    agent = Agent(spec, place, config)
    dtype = agent.actor.model.config.params_dtype
    bound = TOLERANCES[dtype] if tolerance is None else tolerance

    def compare(name: str, ours: list[np.ndarray], other: list[np.ndarray], must_differ: bool = False) -> Finding:
        difference_T = np.abs(np.concatenate(ours) - np.concatenate(other))
        return finding_of(spec.name, name, dtype, difference_T, bound, must_differ)

    with agent.rollout.devices.answering(then_learns=True):
        sequences, num_prompt, sampled = _sequences(agent, config)
        of_engine = agent.rollout.engine.logprobs(sequences)
    scored = [_all_scored(tokens) for tokens in sequences]
    with agent.rollout.devices.learning(lambda _: nullcontext()):
        before = agent.actor.token_logprobs(scored)
        agent.actor.learn_supervised(scored, num_trained_tokens=sum(sequence.num_trained for sequence in scored))
        after = agent.actor.token_logprobs(scored)
    agent.rollout.publish_weights(1)
    findings = [
        compare("Megatron - vLLM", before, of_engine),
        compare("Megatron - vLLM, as it sampled", [row[num_prompt - 1 :] for row in before[: len(sampled)]], sampled),
    ]
    if place.coordinate.agent_rank == 0:
        findings.append(compare("Megatron - Hugging Face", before, _hugging_face(spec, sequences, dtype)))
    findings.append(compare("moved by one update", after, before, must_differ=True))
    with agent.rollout.devices.answering():
        findings.append(compare("Megatron - vLLM after it", after, agent.rollout.engine.logprobs(sequences)))
    agent.rollout.close()
    return findings


def _sequences(agent: Agent, config: Config) -> tuple[list[list[int]], int, list[np.ndarray]]:
    """Sampled and random sequences, the prompt lengths of the sampled ones (which come first), and their log-probs."""
    vocabulary = agent.actor.architecture.vocab_size
    rng = np.random.default_rng(config.seed)
    num_prompt = min(PROMPT_TOKENS, config.rollout.max_prompt_tokens)
    prompts = rng.integers(0, vocabulary, (NUM_ANSWERS, num_prompt)).tolist()
    seeds = [answer_seed(config.seed, 0, index, 0, agent.index) for index in range(NUM_ANSWERS)]
    max_tokens = min(config.rollout.max_answer_tokens, LONGEST - num_prompt)
    answers = agent.rollout.engine.generate(prompts, seeds, max_tokens=max_tokens, return_logprobs=True)
    # The engine scores at most one token less than its context has.
    longest = min(LONGEST, agent.rollout.engine.max_model_len - 1)
    whole = [(prompt + answer.token_ids.tolist())[:longest] for prompt, answer in zip(prompts, answers)]
    sampled = [answer.logprobs[: len(tokens) - num_prompt] for answer, tokens in zip(answers, whole)]
    random = [rng.integers(0, vocabulary, size).tolist() for size in (2, (longest + 2) // 2, longest)]
    return whole + random, num_prompt, sampled


def _all_scored(tokens: Sequence[int]) -> TokenSequence:
    """A sequence in which every token after the first is an answer."""
    ids = np.array(tokens, dtype=np.int32)
    return TokenSequence(ids[:1], ids[1:], num_trained=len(ids) - 1)


@torch.no_grad()
def _hugging_face(spec: AgentConfig, sequences: Sequence[Sequence[int]], dtype: torch.dtype) -> list[np.ndarray]:
    """Log-probs of all tokens after the first by transformers, on the CPU: the other two fill the devices' memory."""
    disable_progress_bar()  # a job's output is a log
    auto_class = AutoModelForImageTextToText if has_tower(spec.model) else AutoModelForCausalLM
    model = auto_class.from_pretrained(spec.model, dtype=dtype, trust_remote_code=spec.trust_remote_code)
    scores = []
    for tokens in sequences:
        tokens_T = torch.tensor(tokens)
        logits_TV = model(tokens_T[None]).logits[0, :-1].float()
        scores.append(logits_TV.log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0].numpy())
    return scores
