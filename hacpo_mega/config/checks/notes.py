"""Notes for the user on a configuration that is accepted: settings without effect, left open, or of little use.

Elsewhere: settings that are refused (checks.py, pass_through.py), and chat templates (tokenizer_checks.py).
"""

import importlib.util
import math
from collections.abc import Callable, Iterator

from hacpo_mega.config.checks.device_memory import agents_in_bf16
from hacpo_mega.config.tables.schema import Config
from hacpo_mega.models.families.families import FAMILIES
from hacpo_mega.models.files.folder import PREDICTS, read_json, text_fields
from hacpo_mega.models.sharding.megatron_fields import AUX_LOSS

# While nothing has moved, 98 % of own ratios to a bf16 engine's log-probs are this near to 1 (docs/guide/speed.md).
BF16_GAP = 0.01
SMALL_LR = 1e-6
# Below it a model that has been trained gives nearly one answer to a prompt.
LOW_TEMPERATURE = 0.2
REWARDLESS = ("calculator", "relay")  # built-in environments that leave every reward to the judge
UNUSED = {
    "router_aux_loss_coef": "megatron.moe_aux_loss_coeff alone switches on the loss that evens the load of experts",
    **dict.fromkeys(PREDICTS, "layers that predict further tokens are not loaded, trained or exported"),
}


def weak_settings(config: Config) -> Iterator[str]:
    """A line for each setting with which agents learn little or nothing."""
    algorithm, answers = config.algorithm, config.rollout.rollouts_per_prompt
    if config.answers_compared == 1 and algorithm.advantages is None:
        yield (
            f"rollout.rollouts_per_prompt = {answers}: {algorithm.method!r} has no second answer to measure one of its "
            "own against, so an agent learns from the others' alone"
        )
    if (temperature := config.rollout.temperature) < LOW_TEMPERATURE:
        yield (
            f"rollout.temperature = {temperature:g}: answers to a prompt will hardly differ, and equal rewards teach "
            "nothing"
        )
    if algorithm.cross_objective == "band" and len(config.agents) > 1 and algorithm.delta == 0.0:
        yield "algorithm.delta = 0: others' answers train only where their ratio is exactly 1, which is hardly ever"
    updates = config.num_steps * config.updates_per_step
    for agent in config.agents:
        if (warmup := agent.optimizer.warmup_updates) > updates:
            yield (
                f"agents.{agent.name}.optimizer.warmup_updates = {warmup}: the run has {updates} updates, so its "
                f"learning rate ends at {agent.optimizer.lr * updates / warmup:.3g} instead of {agent.optimizer.lr:g}"
            )


# Keys of a table that another setting may leave without effect, when it does so, and why.
UNREAD: tuple[tuple[str, str, Callable[[Config], bool], str], ...] = (
    ("evaluation", "every_steps num_prompts max_answer_tokens", lambda c: not (c.evaluation.files or c.data.generator),
     "nothing is evaluated: data.files holds no prompt out, and there is no evaluation.files"),
    ("checkpoint", "keep_last keep_every keep_best asynchronous", lambda c: not c.checkpoint.is_on,
     "no step is stored: every_steps and every_minutes are 0"),
    ("data", "prompt_field gold_field repeated", lambda c: not (c.data.files or c.evaluation.files), "no file is read"),
    ("data", "skills", lambda c: bool(c.data.files), "only data.generator reads it"),
    ("rollout", "engine_correction_cap", lambda c: c.rollout.engine_correction not in ("token", "sequence"),
     "nothing reads it unless engine_correction is 'token' or 'sequence'"),
    ("training", "diagnose_every", lambda c: not c.diagnoses, "no answers are shared, whose gradients it compares"),
    ("logging", "trace_steps", lambda c: not c.logging.trace, "nothing reads it without trace"),
    ("logging", "project tracked_prompts", lambda c: not c.logging.trackers, "nothing reads it without trackers"),
    ("reward", "num_workers while_sampling timeout_s start_timeout_s", lambda c: not c.reward.has_workers,
     "its graders run in the trainer's process, where nothing is waited for"),
)  # fmt: skip


def unread_settings(config: Config) -> Iterator[str]:
    """A line for each setting that another one leaves without effect."""
    for table, keys, is_unread, reason in UNREAD:
        given = getattr(config, table).model_dump(exclude_defaults=True)
        if is_unread(config):
            yield from (f"{table}.{key} has no effect: {reason}" for key in given if key in keys.split())
    for agent in config.agents:
        if agent.optimizer.min_lr_ratio and agent.optimizer.schedule == "constant":
            yield f"agents.{agent.name}.optimizer.min_lr_ratio has no effect: schedule = 'constant' never falls"
    yield from _best_of_one(config)
    yield from _unread_of_environment(config)


def _unread_of_environment(config: Config) -> Iterator[str]:
    """A line for each setting of the judge that an environment's own rewards leave without effect."""
    environment, reward = config.conversation.environment, config.reward
    if environment is None or environment in REWARDLESS:
        return
    where = f"on a conversation that {environment} gives a reward"
    if reward.require_stop:
        yield f"reward.require_stop has no effect {where}: it keeps this, cut or not"
    if isinstance(reward.success, str):
        yield f"reward.success = {reward.success!r} has no effect {where}: the full one is its success"


def _best_of_one(config: Config) -> Iterator[str]:
    """A line where the last step is the only one that may be the best."""
    checkpoint, every = config.checkpoint, config.evaluation.every_steps
    is_evaluated = bool(config.evaluation.files or config.data.generator)
    if every and not checkpoint.every_minutes:  # by the clock any step may be stored
        every = math.lcm(every, checkpoint.every_steps or 1)
    if checkpoint.keep_best and checkpoint.is_on and not (is_evaluated and 0 < every < config.num_steps):
        files = "" if is_evaluated else ", of evaluation.files"
        yield (
            "checkpoint.keep_best has no effect: no step before the last is both stored and evaluated. Set "
            f"evaluation.every_steps{files}"
        )


def missing_kernels(config: Config) -> Iterator[str]:
    """A line where agents ask for TransformerEngine and Python finds none: `train` would end with it."""
    asking = [agent.name for agent in config.agents if "te" in (agent.transformer, agent.optimizer.kernels)]
    if asking and importlib.util.find_spec("transformer_engine") is None:
        yield (
            f"transformer or optimizer.kernels = 'te' ({', '.join(asking)}): TransformerEngine is not installed here; "
            "build it (docs/guide/gpus.md), or set 'auto'"
        )


def narrow_clip(config: Config) -> str | None:
    """Subject of a line for agents in bf16 whose own answers are clipped within the gap of their engines; or None."""
    algorithm, names = config.algorithm, agents_in_bf16(config)
    is_wide = min(algorithm.eps_low, algorithm.eps_high) >= BF16_GAP
    if is_wide or algorithm.is_token_level or algorithm.objective is not None or not names:
        return None
    return (
        f"algorithm.eps_low = {algorithm.eps_low:g}, eps_high = {algorithm.eps_high:g}: rounding in bf16 moves ratios "
        f"of short answers of {', '.join(names)} further"
    )


def narrow_clip_note(config: Config) -> Iterator[str]:
    """The line for a run whose clip cuts rounding: one step off in bf16, or on policy at a small learning rate."""
    if (subject := narrow_clip(config)) is None:
        return
    if config.engine_scores:
        yield f"{subject}, to and from the engine: about a quarter lose their gradient by it. Set both to {BF16_GAP}"
    elif any(agent.optimizer.lr <= SMALL_LR for agent in config.agents if agent.name in agents_in_bf16(config)):
        yield f"{subject} than updates at a learning rate of {SMALL_LR:g} or less: look at self/clipped"


def default_success_note(config: Config) -> Iterator[str]:
    """The line for a run without reward.success whose rewards may lie between 0 and 1."""
    reward = config.reward
    if reward.success is not None or not reward.may_be_graded:
        return
    readers = ", ".join((*config.algorithm.success_readers, "pass@k and maj@k of eval"))
    heaviest = max(reward.parts, key=lambda name: reward.parts[name].weight, default=None)
    whole = next((name for name, part in reward.parts.items() if not part.may_be_graded), heaviest)
    part = "" if whole is None else f'reward.success = "{whole}", for the full reward of that part, or '
    yield (
        "reward.success is not given: nothing says which answers are a success, so those with the full reward of 1 "
        f"count, for {readers}. Set {part}the least reward of one, such as reward.success = 0.9"
    )


def unused_fields(config: Config) -> Iterator[str]:
    """A line for each field of UNUSED in an agent's config.json, and for prompts that its model cannot share."""
    for agent in config.agents:
        family = FAMILIES.get(str(text_fields(agent.model).get("model_type")))
        if family is not None and family.delta_net is not None and config.training.share_prompts:
            yield f"{agent.name}: training.share_prompts is not used: gated delta nets read it for each answer"
        fields = read_json(agent.model / "config.json")
        for name in UNUSED.keys() & fields.keys():
            if fields[name] and not (name == "router_aux_loss_coef" and agent.megatron.get(AUX_LOSS)):
                yield f"{agent.name}: config.json has {name} = {fields[name]!r}, which is not used: {UNUSED[name]}"


def suggestions(config: Config) -> Iterator[str]:
    """A line for each agent whose engine is quantized, so that it samples from another policy than the trained one.

    One step off has none: there the ratio is to the engine's log-probs already.
    """
    if config.rollout.engine_correction != "none" or config.mode.one_step_off:
        return
    for agent in config.agents:
        kind, cache = agent.vllm.get("quantization"), agent.vllm.get("kv_cache_dtype")
        named = {"quantization": kind, "kv_cache_dtype": cache if str(cache).startswith("fp8") else None}
        for key, value in named.items():
            if value is not None:
                yield (
                    f"agents.{agent.name}.vllm.{key} = {value!r}: its answers are drawn from a coarser policy than the "
                    "one that is trained; rollout.engine_correction = 'token' weighs every token by how much"
                )
