"""The page of a run: one HTML file without any reference to the outside, in light and dark.

Its samples are prompts of a few steps, the agents' answers side by side: each with its reward and, for each learner,
its ratio and advantage.
"""

import datetime
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hacpo_grading.texts.chat_messages import messages_of, tools_of
from hacpo_mega.logbook.evaluation_file import COLUMNS, RESULT, read_evaluation, rows_of, warnings_of
from hacpo_mega.logbook.files.rollout_log import logged_steps, prompt_text, read_rollouts
from hacpo_mega.logbook.steps.sharing import WORDS, Fates
from hacpo_mega.report.catalogue import agent_colour
from hacpo_mega.report.html import Html, join, table, tag
from hacpo_mega.report.plots import Picture
from hacpo_mega.report.run import Accuracy, Run, accuracies, evaluated_skills, measure_of

STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
LONGEST_S = 1e9  # of a run: a longer duration means that a clock was wrong
PROMPTS_PER_STEP = 4
ANSWERS_SHOWN = 2  # of each agent, different ones; the others are folded away
LONGEST_ANSWER = 6000
MOST_TOKENS = 400  # of a strip; the number of the others is given
STOPS = {"length": "cut at the limit", "cut": "cut as late"}
ROW_NAMES = ("uid", "id", "name", "index")  # fields of a row that may hold its name
MARKED, STRONG = 0.01, 0.2  # |log ratio| from which on a token is marked, and marked strongly
# The page runs no script and loads nothing, whatever text it shows; its styles are inline, also in attributes.
POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\">"
)


def render_page(run: Run, pictures: list[Picture]) -> str:
    """The whole page as text."""
    name = run.folder.resolve().name
    cards = tag("div", *(_card(run, agent) for agent in run.agents), class_="cards")
    parts = [_head(run, name), _sharing_alert(run), cards, _facts(run), _accuracy_section(run)]
    parts += [render_benchmarks(run.folder), *(render_picture(picture, "h2") for picture in pictures)]
    if (samples := render_samples(run)) is not None:
        note = (
            "Every answer was sampled while training. A is the advantage an answer has for a learner, omega applied. "
            "Tokens, where the run logs them (logging.rollout_tokens), lie on green where the learner makes the answer "
            "likelier and on red where less likely, deeper with |A|, and are underlined where its ratio is not 1: "
            "dotted below, solid above, thick beyond 20 %."
        )
        parts.append(join(tag("h2", "Sample prompts"), tag("p", note, class_="note"), samples))
    return whole_page(name, [*parts, _appendix(run)])


def whole_page(title: str, parts: Iterable[Html | None]) -> str:
    """A page as text: it opens from disk, runs no script and refers to nothing outside."""
    meta = Html(f'<meta charset="utf-8">{POLICY}<meta name="viewport" content="width=device-width">')
    head = tag("head", meta, tag("title", f"{title} - hacpo_mega"), tag("style", Html(STYLE)))
    return f"<!doctype html>\n{tag('html', head, tag('body', *filter(None, parts)), lang='en')}\n"


def _head(run: Run, name: str) -> Html:
    planned = run.setting("num_steps")
    progress = f"{run.num_steps} of {planned} steps" if planned else f"{run.num_steps} steps"
    method = " / ".join(str(part) for key in ("method", "preset") if (part := run.setting("algorithm", key)))
    return join(tag("h1", name), tag("div", " · ".join(filter(None, (method, progress))), class_="sub"))


def _sharing_alert(run: Run) -> Html:
    """A line at the top of the page for every learner that learnt next to nothing from a source."""
    lines = [
        tag("div", tag("b", f"{learner} learnt next to nothing from {source}"), f": {_reached_text(fates)} ({fates})")
        for learner, source in run.pairs
        if (fates := Fates.total(run.fates(learner, source).values())).is_lost
    ]
    return tag("div", *lines, class_="alert") if lines else Html()


def _reached_text(fates: Fates) -> str:
    return f"{fates.reached:,} of {fates.usable:,} usable answers reached it"


def _learnt_from_others(run: Run, agent: str) -> Fates | None:
    """The fates of all others' answers for an agent; None if there were none, or the run has no counts."""
    every = [fates for source in run.agents if source != agent for fates in run.fates(agent, source).values()]
    return Fates.total(every) if every else None


def _card(run: Run, agent: str) -> Html:
    """An agent's gain: accuracy if it was evaluated, else the reward of its first and last steps."""
    evaluated = accuracies(run, agent)
    rewards = run.series(f"agent/{agent}/reward_mean").values
    lines = []
    if len(evaluated) > 1:
        first, last = evaluated[0], evaluated[-1]
        lines = _change(f"held-out {measure_of(evaluated)}", first.value, last.value, first.gain_interval(last))
    elif evaluated:
        lines = [
            tag("div", f"{evaluated[0].value:.3f}", class_="big"),
            tag("div", f"held-out {measure_of(evaluated)}, step {evaluated[0].step}"),
        ]
    elif len(rewards) > 1:
        lines = _change("reward while training", rewards[0], rewards[-1], None)
    counts = run.series(f"agent/{agent}/num_answers").values
    lines += [tag("div", f"{int(sum(counts)):,} answers given", class_="sub")] if counts else []
    lines += _sharing_line(run, agent)
    colour = f"--agent:{agent_colour(run, agent)}"
    return tag("div", tag("div", agent, class_="name"), *lines, class_="card", style=colour)


def _sharing_line(run: Run, agent: str) -> list[Html]:
    """A line about the part of others' answers that taught the agent; none where nothing is known of it."""
    fates = _learnt_from_others(run, agent)
    if fates is None or fates.share is None:
        return []
    subject = "learnt alone: " if fates.is_lost else "of others: "
    text = f"{subject}{_reached_text(fates)} ({fates.share:.0%})"
    return [tag("div", text, class_="alone" if fates.is_lost else "sub")]


def _change(label: str, start: float, end: float, interval: tuple[float, float] | None) -> list[Html]:
    gain = f"{end - start:+.3f}{_interval_text(interval, '+.3f')}"
    return [
        tag("div", tag("small", f"{start:.3f} → "), f"{end:.3f}", class_="big"),
        tag("div", gain, tag("small", f"  {label}"), class_=f"gain {_gain_class(interval)}".strip()),
    ]


def _gain_class(interval: tuple[float, float] | None) -> str:
    """The style of a gain: green or red where its interval excludes 0."""
    if interval is None or interval[0] <= 0.0 <= interval[1]:
        return ""
    return "up" if interval[0] > 0.0 else "down"


def _facts(run: Run) -> Html:
    start = run.starts[-1] if run.starts else {}
    facts = {
        "folder": str(run.folder.resolve()),
        "seed": run.setting("seed"),
        "agents": ", ".join(_describe_agent(agent) for agent in run.config.get("agents", [])),
        "lanes": run.setting("lanes"),
        "prompts per step": run.setting("training", "prompts_per_step"),
        "answers per prompt and agent": run.setting("rollout", "rollouts_per_prompt"),
        "duration": _duration(run),
        "starts": len(run.starts) if len(run.starts) > 1 else None,
        "commit": (start.get("commit") or "").replace("+", " with local changes ").strip(),
        "versions": ", ".join(f"{name} {version}" for name, version in start.get("packages", {}).items()),
    }
    return facts_grid({name: str(fact) for name, fact in facts.items() if fact not in (None, "")})


def facts_grid(facts: Mapping[str, str]) -> Html:
    """Facts by their names."""
    return tag("dl", *(join(tag("dt", name), tag("dd", fact)) for name, fact in facts.items()), class_="facts-grid")


def _describe_agent(agent: dict[str, Any]) -> str:
    sizes = {key: agent.get(key, 1) for key in ("tp", "cp", "pp")}
    layout = ", ".join(f"{key} {size}" for key, size in sizes.items() if key != "cp" or size > 1)
    return f"{agent.get('name')} ({agent.get('model', 'unknown model')}; {layout})"


def _duration(run: Run) -> str | None:
    """Time from the first start (or line of metrics) to the last line, pauses between restarts included."""
    times = run.series("time_unix_s").values
    begin = min([*(start["time_unix_s"] for start in run.starts if "time_unix_s" in start), *times], default=None)
    is_known = bool(times) and 0.0 <= times[-1] - begin < LONGEST_S
    return str(datetime.timedelta(seconds=round(times[-1] - begin))) if is_known else None


def _accuracy_section(run: Run) -> Html:
    rows, evaluations = [], []
    for agent in run.agents:
        for skill in [None, *evaluated_skills(run)]:
            if evaluated := accuracies(run, agent, skill):
                evaluations.append(evaluated)
                rows.append(_accuracy_row(f"{agent} · {skill}" if skill else agent, evaluated, bold=skill is None))
    if not rows:
        return Html()
    paired = [evaluated[0].is_paired(evaluated[-1]) for evaluated in evaluations if len(evaluated) > 1]
    comparison = "prompt by prompt" if paired and all(paired) else "as of two independent samples"
    measure = measure_of(point for evaluated in evaluations for point in evaluated)
    note = (
        f"In brackets 95 %: {'Wilson' if measure == 'accuracy' else 'by the standard error of the mean'}; of the "
        f"difference {comparison}. It is green or red where that excludes 0."
    )
    head = ["agent", "before", "after", "difference", "prompts", "steps"]
    return join(
        tag("h2", f"{measure.capitalize()} before and after"),
        tag("p", note, class_="note"),
        table(head, rows, class_="numbers"),
    )


def _accuracy_row(name: str, evaluated: list[Accuracy], *, bold: bool) -> list[str]:
    first, last = evaluated[0], evaluated[-1]
    has_later = len(evaluated) > 1
    interval = first.gain_interval(last)
    gain = f"{last.value - first.value:+.3f}{_interval_text(interval, '+.3f')}"
    return [
        tag("b", name) if bold else name,
        f"{first.value:.3f}{_uncertainty(first)}",
        f"{last.value:.3f}{_uncertainty(last)}" if has_later else "–",
        tag("span", gain, class_=_gain_class(interval)) if has_later else "–",
        str(last.num_evaluated or "–"),
        f"{first.step} → {last.step}" if has_later else str(first.step),
    ]


def _uncertainty(point: Accuracy) -> str:
    is_flat = point.all_equal and point.interval is not None
    return f" (all {point.num_evaluated} equal)" if is_flat else _interval_text(point.interval)


def _interval_text(interval: tuple[float, float] | None, spec: str = ".3f") -> str:
    return "" if interval is None else f" [{interval[0]:{spec}}, {interval[1]:{spec}}]"


def render_picture(picture: Picture, heading: str) -> Html:
    """A figure below its title (in an element such as h2, the `heading`), its verdicts and its note."""
    drawing = tag("figure", Html(picture.svg), role="img", aria_label=picture.title)
    texts = [tag("p", text, class_=f"verdict {level}") for level, text in picture.verdicts]
    box = tag("div", *texts, class_="verdicts") if texts else Html()
    return join(tag(heading, picture.title), box, tag("p", picture.note, class_="note"), drawing)


def _appendix(run: Run) -> Html:
    """Everything that was measured in the last step, and the configuration."""
    last = run.steps[run.num_steps]
    rows = [[name, f"{value:.6g}"] for name, value in (last.values | last.timing).items()]
    measured = table(["name", "value"], rows, class_="numbers")
    parts = [tag("details", tag("summary", f"All metrics of step {run.num_steps}"), measured)]
    if run.config_text:
        parts.append(tag("details", tag("summary", "Configuration"), tag("pre", run.config_text)))
    return join(tag("h2", "Details"), *parts)


def render_benchmarks(run_dir: Path) -> Html | None:
    """A table with a row per benchmark, or None without evaluations. ValueError names a file that is no evaluation."""
    files = sorted((run_dir / "evaluations").glob(f"*/{RESULT}"))
    evaluations = {file.parent.name: read_evaluation(file) for file in files}
    rows = [[name, *row] for name, evaluation in evaluations.items() for row in rows_of(evaluation)]
    if not rows:
        return None
    note = "Intervals are bootstraps over problems: they say how much a score depends on which problems there are."
    warnings = [f"{name}, {line}." for name, evaluation in evaluations.items() for line in warnings_of(evaluation)]
    notes = [tag("p", text, class_="note") for text in (note, *warnings)]
    return join(tag("h2", "Benchmarks"), *notes, table(["evaluation", *COLUMNS], rows, class_="numbers"))


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
    """The `number` prompts to show: from each skill in turn, first those whose answers earned different rewards."""
    by_skill: dict[str, list[dict[str, Any]]] = {}
    for prompt in sorted(prompts, key=lambda prompt: (_is_uniform(prompt), prompt["prompt_index"])):
        by_skill.setdefault(prompt["skill"], []).append(prompt)
    groups = [group for _, group in sorted(by_skill.items())]
    in_turn = [group[turn] for turn in range(number) for group in groups if turn < len(group)]
    return in_turn[:number]


def _is_uniform(prompt: dict[str, Any]) -> bool:
    return len({answer["reward"] for answer in prompt["answers"]}) < 2


def _render_prompt(run: Run, prompt: dict[str, Any]) -> Html:
    head = tag(
        "div",
        *(tag("span", label, class_="skill") for label in _prompt_labels(prompt)),
        *_messages(prompt_text(prompt)),
        tag("span", "gold ", tag("b", prompt["gold"]), class_="gold"),
        class_="prompt",
    )
    agents = list(dict.fromkeys(answer["agent"] for answer in prompt["answers"]))
    columns = [_render_column(run, agent, [a for a in prompt["answers"] if a["agent"] == agent]) for agent in agents]
    return tag("article", head, tag("div", *columns, class_="columns", style=f"--columns:{len(columns)}"))


def _prompt_labels(prompt: dict[str, Any]) -> list[str]:
    """The skill of a prompt and the id that its row gives; the prompt's hash only if both are missing."""
    row = prompt.get("row") or {}
    row_id = next((str(row[key]) for key in ROW_NAMES if isinstance(row.get(key), str | int) and row[key] != ""), "")
    return [label for label in (prompt["skill"], row_id) if label] or [prompt["id"]]


def _messages(text: str) -> list[Html]:
    """The text of a prompt; for a chat, every message below its role."""
    messages = messages_of(text)
    if messages is None:
        return [tag("pre", text)]
    tools = [{"role": "tools", "content": json.dumps(tools_of(text), ensure_ascii=False)}] if tools_of(text) else []
    is_single = len(messages) == 1 and not tools
    return [
        tag("pre", message["content"]) if is_single else tag(
            "div", tag("small", message["role"]), tag("pre", message["content"]), class_=f"message {message['role']}"
        )
        for message in (*tools, *messages)
    ]  # fmt: skip


def _render_column(run: Run, agent: str, answers: list[dict[str, Any]]) -> Html:
    rewards = [answer["reward"] for answer in answers if answer["reward"] is not None]
    mean = f"mean reward {sum(rewards) / len(rewards):.2f} of {len(rewards)}" if rewards else "nothing judged"
    rendered = [_render_answer(answer, times) for answer, times in _group_equal(answers)]
    shown, rest = rendered[:ANSWERS_SHOWN], rendered[ANSWERS_SHOWN:]
    more = [tag("details", tag("summary", f"{len(rest)} more"), *rest)] if rest else []
    colour = agent_colour(run, agent) if agent in run.agents else "currentColor"
    name = tag("h4", tag("span", "●", style=f"color:{colour}"), f" {agent} ", tag("small", mean))
    return tag("div", name, *shown, *more, class_="column")


def _group_equal(answers: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """Answers of one text as (the first of them, how many), the most frequent first."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for answer in answers:
        groups.setdefault((answer["text"], answer["reward"], answer["verdict"], answer["stop"]), []).append(answer)
    return [(group[0], len(group)) for group in sorted(groups.values(), key=len, reverse=True)]


def _render_answer(answer: dict[str, Any], times: int) -> Html:
    reward = answer["reward"]
    if reward is None:
        style = "unjudged"
    elif answer["verdict"] == "correct":
        style = "right"
    else:
        style = "wrong" if reward <= 0 else "partly"
    facts = ["unjudged" if reward is None else f"reward {reward:g}", answer["verdict"].replace("_", " ")]
    facts += [f"{answer['num_tokens']} tokens", *([STOPS[answer["stop"]]] if answer["stop"] in STOPS else [])]
    facts += [f"{times} times"] if times > 1 else []
    learners = _learners(answer)
    return tag(
        "div",
        tag("pre", _shorten(answer["text"])),
        *_render_strips(answer, learners),
        tag("div", " · ".join(facts), class_="facts"),
        tag("div", *(_render_learner(answer, learner) for learner in learners), class_="learners"),
        class_=f"answer {style}",
    )


def _learners(answer: dict[str, Any]) -> list[str]:
    """The learners that an answer concerns: its own agent, and all that trained on it or left it out for a reason."""
    reasons = answer.get("not_trained")
    others = answer["advantage"] if reasons is None else reasons  # an older run does not say why
    own = [answer["agent"]] if answer["agent"] in answer["advantage"] else []
    known = {*own, *others, *answer["ratio"]}
    return [learner for learner in dict.fromkeys([*answer["advantage"], *answer["ratio"], *others]) if learner in known]


def _render_learner(answer: dict[str, Any], learner: str) -> Html:
    """The advantage and ratio of an answer that trained the learner, in colour; else the reason why it did not."""
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
    text = WORDS.get(reason, reason.replace("_", " "))
    return text if reason == "outside_band" else f"not trained: {text}"


def _render_strips(answer: dict[str, Any], learners: list[str]) -> list[Html]:
    """The answer's tokens marked for its own agent and, folded, for the others; nothing if no tokens are logged."""
    if not answer.get("tokens"):
        return []
    own = answer["agent"]
    others = [
        join(tag("small", f"for {learner}"), _render_strip(answer, learner)) for learner in learners if learner != own
    ]
    folded = [tag("details", tag("summary", "tokens for the others"), *others)] if others else []
    return [_render_strip(answer, own), *folded]


def _render_strip(answer: dict[str, Any], learner: str) -> Html:
    """Tokens in the advantage's colour, underlined by the ratio: the token's for its own agent, else the answer's."""
    advantage = 0.0 if _why_not_trained(answer, learner) else answer["advantage"].get(learner, 0.0)
    tokens, logprobs, is_own = answer["tokens"], answer.get("token_logprob", []), learner == answer["agent"]
    ratios = answer.get("token_ratio", []) if is_own else [answer["ratio"].get(learner)] * len(tokens)
    shown = [
        _render_token(text, *(float(v[i]) if i < len(v) and v[i] is not None else None for v in (ratios, logprobs)))
        for i, text in enumerate(tokens[:MOST_TOKENS])
    ]
    more = [tag("small", f" … {len(tokens) - MOST_TOKENS} more tokens")] if len(tokens) > MOST_TOKENS else []
    sign = "up" if advantage > 0 else "down" if advantage < 0 else "still"
    depth = f"--depth:{min(60, round(20 * abs(advantage)))}%"
    return tag("div", *shown, *more, class_=f"strip {sign}", style=depth)


def _render_token(text: str, ratio: float | None, logprob: float | None) -> Html:
    facts = [] if logprob is None else [f"log-prob {logprob:.3f}"]
    facts += [] if ratio is None else [f"ratio {ratio:.3f}"]
    log_ratio = math.log(ratio) if ratio is not None and 0 < ratio < math.inf else 0.0
    strength = " strong" if abs(log_ratio) >= STRONG else ""
    mark = "" if abs(log_ratio) < MARKED else f"{'more' if log_ratio > 0 else 'less'}{strength}"
    return tag("span", text, class_=mark, title=", ".join(facts))


def _shorten(text: str) -> str:
    """Head and tail of an answer that is too long for the page; the whole answer is in rollouts/."""
    if len(text) <= LONGEST_ANSWER:
        return text
    half = LONGEST_ANSWER // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
