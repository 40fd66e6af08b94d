"""Sample prompts of a run side by side: every agent's answers with reward, and ratio and advantage for each learner."""

import json
import math
from typing import Any

from hacpo_grading.texts.chat_messages import messages_of, tools_of
from hacpo_mega.logbook.files.rollout_log import logged_steps, prompt_text, read_rollouts
from hacpo_mega.logbook.steps.sharing import WORDS
from hacpo_mega.report.colours import agent_colour
from hacpo_mega.report.html import Html, join, tag
from hacpo_mega.report.run import Run

PROMPTS_PER_STEP = 4
ANSWERS_SHOWN = 2  # of each agent, different ones; the others are folded away
LONGEST_ANSWER = 6000
MOST_TOKENS = 400  # of a strip; the rest is counted
ROW_NAMES = ("uid", "id", "name", "index")  # fields of a row that may hold its name
# A token's ratio is marked from these distances of its logarithm on: barely, and clearly.
MARKED, STRONG = 0.01, 0.2


def render_samples(run: Run) -> Html | None:
    """Prompts of the first, the middle and the last logged step; None when there are no rollouts."""
    steps = logged_steps(run.folder)
    if not steps:
        return None
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    return join(*(_render_step(run, step) for step in chosen))


def _render_step(run: Run, step: int) -> Html:
    prompts = choose_prompts(read_rollouts(run.folder, step), PROMPTS_PER_STEP)
    return join(tag("h3", f"Step {step}"), *(_render_prompt(run, prompt) for prompt in prompts))


def choose_prompts(prompts: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """A few telling ones: skills in turn, and of a skill first the prompts on which not all answers did the same."""
    by_skill: dict[str, list[dict[str, Any]]] = {}
    for prompt in sorted(prompts, key=lambda prompt: (_is_uniform(prompt), prompt["prompt_index"])):
        by_skill.setdefault(prompt["skill"], []).append(prompt)
    turns = [(turn, skill, p) for skill, group in sorted(by_skill.items()) for turn, p in enumerate(group[:number])]
    turns.sort(key=lambda entry: entry[:2])
    return [prompt for _, _, prompt in turns[:number]]


def _is_uniform(prompt: dict[str, Any]) -> bool:
    return len({answer["reward"] for answer in prompt["answers"]}) < 2


def _render_prompt(run: Run, prompt: dict[str, Any]) -> Html:
    head = tag(
        "div",
        *(tag("span", name, class_="skill") for name in _names(prompt)),
        *_messages(prompt_text(prompt)),
        tag("span", "gold ", tag("b", prompt["gold"]), class_="gold"),
        class_="prompt",
    )
    agents = list(dict.fromkeys(answer["agent"] for answer in prompt["answers"]))
    columns = [_render_column(run, agent, [a for a in prompt["answers"] if a["agent"] == agent]) for agent in agents]
    return tag("article", head, tag("div", *columns, class_="columns", style=f"--columns:{len(columns)}"))


def _names(prompt: dict[str, Any]) -> list[str]:
    """Its skill and its row's own id; its hash only if both are missing."""
    row = prompt.get("row") or {}
    own = next((str(row[key]) for key in ROW_NAMES if isinstance(row.get(key), str | int) and row[key] != ""), "")
    return [name for name in (prompt["skill"], own) if name] or [prompt["id"]]


def _messages(text: str) -> list[Html]:
    """A prompt as a person reads it: of a chat every message below its role."""
    messages = messages_of(text)
    if messages is None:
        return [tag("pre", text)]
    tools = [{"role": "tools", "content": json.dumps(tools_of(text), ensure_ascii=False)}] if tools_of(text) else []
    alone = len(messages) == 1 and not tools
    return [
        tag("pre", message["content"]) if alone else tag(
            "div", tag("small", message["role"]), tag("pre", message["content"]), class_=f"message {message['role']}"
        )
        for message in (*tools, *messages)
    ]  # fmt: skip


def _render_column(run: Run, agent: str, answers: list[dict[str, Any]]) -> Html:
    rewards = [answer["reward"] for answer in answers if answer["reward"] is not None]
    right = f"mean reward {sum(rewards) / len(rewards):.2f} of {len(rewards)}" if rewards else "nothing judged"
    different = _group_equal(answers)
    shown = [_render_answer(answer, times) for answer, times in different[:ANSWERS_SHOWN]]
    rest = [_render_answer(answer, times) for answer, times in different[ANSWERS_SHOWN:]]
    more = [tag("details", tag("summary", f"{len(rest)} more"), *rest)] if rest else []
    colour = agent_colour(run, agent) if agent in run.agents else "currentColor"
    name = tag("h4", tag("span", "●", style=f"color:{colour}"), f" {agent} ", tag("small", right))
    return tag("div", name, *shown, *more, class_="column")


def _group_equal(answers: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """Answers of one text as (the first of them, how many), the most frequent first."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for answer in answers:
        groups.setdefault((answer["text"], answer["reward"], answer["verdict"], answer["stop"]), []).append(answer)
    return [(group[0], len(group)) for group in sorted(groups.values(), key=len, reverse=True)]


def _render_answer(answer: dict[str, Any], times: int) -> Html:
    reward = answer["reward"]
    is_right = answer["verdict"] == "correct"
    kind = "unjudged" if reward is None else "right" if is_right else "wrong" if reward <= 0 else "partly"
    facts = [
        "unjudged" if reward is None else f"reward {reward:g}",
        answer["verdict"].replace("_", " "),
        f"{answer['num_tokens']} tokens",
        *(["cut at the limit"] if answer["stop"] == "length" else ["cut as late"] if answer["stop"] == "cut" else []),
        *([f"{times} times"] if times > 1 else []),
    ]
    learners = _learners(answer)
    return tag(
        "div",
        tag("pre", _shorten(answer["text"])),
        *_render_strips(answer, learners),
        tag("div", " · ".join(facts), class_="facts"),
        tag("div", *(_render_learner(answer, learner) for learner in learners), class_="learners"),
        class_=f"answer {kind}",
    )


def _learners(answer: dict[str, Any]) -> list[str]:
    """Learners to do with an answer: its own agent, and all that trained on it or left it out for a reason."""
    reasons = answer.get("not_trained")
    others = answer["advantage"] if reasons is None else reasons  # an older run does not say why
    own = [answer["agent"]] if answer["agent"] in answer["advantage"] else []
    known = {*own, *others, *answer["ratio"]}
    return [learner for learner in dict.fromkeys([*answer["advantage"], *answer["ratio"], *others]) if learner in known]


def _render_learner(answer: dict[str, Any], learner: str) -> Html:
    """An answer that trained the learner in colour, with its advantage; else the reason why it did not."""
    advantage, ratio = answer["advantage"].get(learner), answer["ratio"].get(learner)
    reason = _why_not_trained(answer, learner)
    parts = [] if advantage is None or (reason and ratio is None) else [f" A {advantage:+.2f}"]
    parts += [] if ratio is None else [f" ratio {ratio:.3f}"]
    parts += [f" {reason}"] if reason else []
    sign = "" if not advantage or reason else " up" if advantage > 0 else " down"
    return tag("span", tag("b", f"→ {learner}"), ",".join(parts), class_=f"learner{sign}")


def _why_not_trained(answer: dict[str, Any], learner: str) -> str:
    """The reason as text; empty if the learner was trained on the answer."""
    reason = answer.get("not_trained", {}).get(learner)
    if reason is None:
        return "" if learner in answer["ratio"] or learner == answer["agent"] else "not trained"
    words = WORDS.get(reason, reason.replace("_", " "))
    return words if reason == "outside_band" else f"not trained: {words}"


def _render_strips(answer: dict[str, Any], learners: list[str]) -> list[Html]:
    """The answer's tokens as its own agent sees them and, folded, as the others do; nothing if none are logged."""
    if not answer.get("tokens"):
        return []
    own = answer["agent"]
    others = [
        join(tag("small", f"for {learner}"), _render_strip(answer, learner)) for learner in learners if learner != own
    ]
    folded = [tag("details", tag("summary", "tokens for the others"), *others)] if others else []
    return [_render_strip(answer, own), *folded]


def _render_strip(answer: dict[str, Any], learner: str) -> Html:
    """Tokens on the colour of the learner's advantage, underlined by its ratio: its own by token, others' by answer."""
    advantage = 0.0 if _why_not_trained(answer, learner) else answer["advantage"].get(learner, 0.0)
    tokens, is_own = answer["tokens"], learner == answer["agent"]
    of_answer = None if is_own else answer["ratio"].get(learner)
    ratios = answer.get("token_ratio", []) if is_own else [of_answer] * len(tokens)
    logprobs = answer.get("token_logprob", [])
    shown = [
        _render_token(text, *(float(v[i]) if i < len(v) and v[i] is not None else None for v in (ratios, logprobs)))
        for i, text in enumerate(tokens[:MOST_TOKENS])
    ]
    more = [tag("small", f" … {len(tokens) - MOST_TOKENS} more tokens")] if len(tokens) > MOST_TOKENS else []
    kind = "up" if advantage > 0 else "down" if advantage < 0 else "still"
    depth = f"--depth:{min(60, round(20 * abs(advantage)))}%"
    return tag("div", *shown, *more, class_=f"strip {kind}", style=depth)


def _render_token(text: str, ratio: float | None, logprob: float | None) -> Html:
    facts = [] if logprob is None else [f"log-prob {logprob:.3f}"]
    facts += [] if ratio is None else [f"ratio {ratio:.3f}"]
    far = math.log(ratio) if ratio is not None and 0 < ratio < math.inf else 0.0
    mark = "" if abs(far) < MARKED else f"{'more' if far > 0 else 'less'}{' strong' if abs(far) >= STRONG else ''}"
    return tag("span", text, class_=mark, title=", ".join(facts))


def _shorten(text: str) -> str:
    """Head and tail of an answer that would make the page heavy; the whole one is in rollouts/."""
    if len(text) <= LONGEST_ANSWER:
        return text
    half = LONGEST_ANSWER // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
