"""A plan for people, as aligned text, and for programs, as JSON."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from hacpo_lab.planning.cluster_file import Cluster
from hacpo_lab.planning.configuration import Work
from hacpo_lab.planning.kinds import ASSUMED
from hacpo_lab.planning.plan import AgentPlan, Plan
from hacpo_lab.planning.publish_bytes import PublishBytes, whole_tensors
from hacpo_lab.planning.published import ratios, worst_ratio
from hacpo_lab.planning.search import JobLayouts
from hacpo_lab.planning.seconds import PHASES
from hacpo_lab.planning.store_cost import job_cost
from hacpo_mega.config.checks.device_memory import memory_table
from hacpo_mega.models.files.visible import ranges
from hacpo_mega.models.sharding.publish_plan import whole_summary

Rows = Sequence[Sequence[str]]
MB, GB = 1e6, 1e9
WIDTH, NAME_WIDTH = 80, 14
MOST_LAYOUTS = 5  # in the text, the fastest first; JSON has all of them
PUBLISHED = {"sent": "sent", "received": "received", "least": "at least", "copied": "copied in place"}


def as_text(plan: Plan, layouts: JobLayouts) -> str:
    """The plan and the layouts as aligned text, part by part."""
    budgets = {agent.name: agent.budget for agent in plan.agents}
    parts = ["\n".join(_cluster_lines(plan)), plan.ranks.table(), memory_table(budgets), *_seconds(plan)]
    parts += [_terms(plan), _messages(plan), _publications(plan)]
    parts += [f"{agent.name}: {summary}" for agent in plan.agents if (summary := whole_summary(_whole(agent)))]
    parts.append("\n".join(_layout_lines(layouts)))
    return "\n\n".join(parts)


def aligned(rows: Rows) -> str:
    """Rows as columns of equal width; a row of one cell is a heading."""
    columns = max(map(len, rows))
    widths = [max(len(row[column]) for row in rows if len(row) == columns) for column in range(columns)]
    return "\n".join(" ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows)


def _cluster_lines(plan: Plan) -> Iterator[str]:
    c, work = plan.cluster, plan.agents[0].work
    device, links = c.device, c.links
    keys, reads, size = job_cost(plan.ranks)
    lines = (
        f"cluster: {c.nodes} nodes x {c.devices_per_node} devices ({c.kind or 'a kind of its own'}), each "
        f"{device.memory_gib:g} GiB, {device.peak_tflops:g} TFLOP/s, {device.memory_gb_per_s:g} GB/s; links "
        f"{links.inside_gb_per_s:g} GB/s inside a node, {links.between_gb_per_s:g} between",
        f"step: {work.prompts} prompts of {work.prompt_tokens:g} tokens, {work.answers:g} answers per agent of "
        f"{work.answer_tokens:g} (the longest {work.longest:g}), {work.trained:g} learnt from in {work.updates} "
        "updates" + _conversations(work),
        f"host of a node: a checkpoint's copy takes {plan.host_gib():.1f} of {c.host.memory_gib:g} GiB",
        f"store: {keys} keys, {reads} reads, {size / 1e6:.1f} MB, all before the end of the first step",
    )
    for line in lines:
        yield from textwrap.wrap(line, WIDTH, subsequent_indent="  ")


def _conversations(work: Work) -> str:
    if work.turns == 1.0:
        return ""
    waits = f", {work.environment_s:g} s between two" if work.environment_s else ""
    return f"; an answer is a conversation of {work.turns:g} own turns{waits}, {work.others_tokens:g} tokens by others"


def _seconds(plan: Plan) -> Iterator[str]:
    rows = [["", *PHASES, "busy", "idle"]]
    for agent in plan.agents:
        cells = (f"{agent.phases_s[name]:.2f}" for name in PHASES)
        rows.append([_name(agent), *cells, f"{agent.busy_s:.2f}", f"{plan.idle_share(agent):.0%}"])
    yield f"{_heading(plan)}\n{aligned(rows)}"
    largest = ((agent.name, *agent.bound_by) for agent in plan.agents)
    yield "\n".join(f"{name}: {share:.0%} of its seconds are {term} of {phase}" for name, phase, term, share in largest)


def _heading(plan: Plan) -> str:
    """The step's seconds, on GPUs as a range since no whole step was timed there, and the limits of the estimate."""
    tokens = sum(agent.work.answers * (agent.work.prompt_tokens + agent.work.answer_tokens) for agent in plan.agents)
    rate = tokens / plan.wall_s / sum(agent.num_devices for agent in plan.agents)
    lines = [
        f"seconds of a step: {plan.wall_s:.2f}",
        f"{rate:.0f} tokens of prompts and own answers a second and device",
    ]
    if not plan.cluster.on_cpu:
        lines[0] += f" to {plan.wall_s * worst_ratio():.0f}: no whole GPU step is timed by this project"
        faster = "; ".join(f"{name} {ratio:.1f}" for name, ratio in ratios().items() if ratio > 1.0)
        lines += [f"steps that others published took so many times their plan: {faster}",
                  f"assumed, with no source: {', '.join(ASSUMED)}"]  # fmt: skip
    return "\n".join(part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="  "))


def _terms(plan: Plan) -> str:
    names = list(dict.fromkeys(term for agent in plan.agents for terms in agent.phases.values() for term in terms))
    rows = [["", *names]]
    for agent in plan.agents:
        rows.append([agent.name])
        for phase in PHASES:
            terms = agent.phases[phase]
            rows.append([f"  {phase}", *(f"{terms[name]:.2f}" if name in terms else "" for name in names)])
    return f"seconds by what they are spent on\n{aligned(rows)}"


def _messages(plan: Plan) -> str:
    rows = [["", "what", "nodes", "GB", "messages", "seconds"]]
    for agent in plan.agents:
        rows.append([agent.name])
        for message in agent.messages:
            link = "inside" if message.inside else "between"
            rows.append([f"  {message.phase}", message.what, link, f"{message.num_bytes / GB:.3f}",
                         f"{message.count:.0f}", f"{message.seconds(plan.cluster):.2f}"])  # fmt: skip
    return f"bytes that a device sends in a step, inside a node or between nodes\n{aligned(rows)}"


def _publications(plan: Plan) -> str:
    rows = [["  ranks", *PUBLISHED.values()]]
    for agent in plan.agents:
        moved = PublishBytes(agent.budget)
        ranks: dict[tuple[int, ...], list[int]] = {}
        for rank, sizes in enumerate(zip(*(getattr(moved, column) for column in PUBLISHED), strict=True)):
            ranks.setdefault(sizes, []).append(rank)
        rows.append([agent.name])
        rows += [[f"  {ranges(alike)}", *(f"{size / MB:.1f}" for size in sizes)] for sizes, alike in ranks.items()]
    return f"MB of a publish by rank of a cell\n{aligned(rows)}"


def _name(agent: AgentPlan) -> str:
    return agent.name if len(agent.name) <= NAME_WIDTH else f"{agent.name[: NAME_WIDTH - 3]}..."


def _whole(agent: AgentPlan) -> dict[str, str]:
    return whole_tensors(agent.budget.actor.architecture, agent.agent.vllm)


def _layout_lines(layouts: JobLayouts) -> Iterator[str]:
    yield "layouts that let all finish soonest, as key=value for the command line"
    for layout in layouts.frontier[: -MOST_LAYOUTS - 1 : -1]:
        idle = " ".join(f"{layout.idle_share(choice):.0%}" for choice in layout.choices)
        yield f"{layout.num_devices} devices, {layout.wall_s:.2f} s a step, idle {idle}"
        overrides = " ".join(layout.overrides())
        indent = {"initial_indent": "  ", "subsequent_indent": "  "}
        yield from textwrap.wrap(overrides, WIDTH, break_long_words=False, break_on_hyphens=False, **indent)


def as_json(plan: Plan, layouts: JobLayouts) -> str:
    """The same for programs; sizes in bytes, times in seconds."""
    table = {
        "cluster": plan.cluster.model_dump(mode="json"),
        "step_s": plan.wall_s,
        "step_s_at_most": plan.wall_s * (1.0 if plan.cluster.on_cpu else worst_ratio()),
        "published_over_planned": {} if plan.cluster.on_cpu else ratios(),
        "host_gib": plan.host_gib(),
        "store": dict(zip(("keys", "reads", "bytes"), job_cost(plan.ranks))),
        "agents": {agent.name: _agent_table(plan, agent, plan.cluster) for agent in plan.agents},
        "layouts": [
            {"devices": w.num_devices, "step_s": w.wall_s, "idle": [w.idle_share(s) for s in w.choices],
             "overrides": w.overrides()} for w in reversed(layouts.frontier)
        ],
    }  # fmt: skip
    return json.dumps(table, indent=1) + "\n"


def _agent_table(plan: Plan, agent: AgentPlan, cluster: Cluster) -> dict[str, Any]:
    return {
        "devices": agent.num_devices,
        "recompute": agent.budget.actor.recompute,
        "memory": {"parts": agent.budget.parts, "phases": agent.budget.phases, "peak": agent.budget.peak},
        "answers_at_once": agent.answers_at_once,
        "phases_s": agent.phases_s,
        "terms_s": {phase: dict(terms) for phase, terms in agent.phases.items()},
        "busy_s": agent.busy_s,
        "idle_share": plan.idle_share(agent),
        "publish": {column: getattr(PublishBytes(agent.budget), column) for column in PUBLISHED}
        | {"whole": _whole(agent)},
        "messages": [
            {"phase": m.phase, "what": m.what, "inside": m.inside, "bytes": m.num_bytes, "count": m.count,
             "seconds": m.seconds(cluster)} for m in agent.messages
        ],
    }  # fmt: skip
