"""Rewards as people write them, one for every way in which a grader may ask for its arguments."""

import asyncio
import functools
import os
import sys
from typing import Dict, List  # noqa: UP035

from hacpo_mega.grading.grader_calls import Unjudged


def by_name(answer, level, gold, *, bonus=0.0):
    """Asks for a field of the row."""
    return min(1.0, float(answer == gold) * level + bonus)


def by_name_or_without(answer, gold, level=0.5, **fields):
    """A field that a row may lack, and all others."""
    assert "prompt" not in fields
    return level if answer == gold else 0.1 * len(fields)


def of_agent(answer, agent):
    """Asks who wrote it."""
    return float(agent == answer)


def rarest(answer, group):
    """Asks for the answers of the group."""
    return 1.0 / group.count(answer)


def in_lists(answers, golds, *, shift=0.0):
    """A batch; the number of answers of the call is its reward for an answer "how many"."""
    if "bad" in answers:
        raise ValueError("cannot read bad")
    if "exit" in answers:
        sys.exit(3)
    if "end" in answers:
        os._exit(3)
    return [len(answers) if a == "how many" else 2.0 * (a == g) - 1 + shift for a, g in zip(answers, golds)]


def too_few(answers):
    """Forgets one."""
    return [1.0] * (len(answers) - 1)


def of_trl(completions, solution, **kwargs):
    """As TRL's users write them for texts."""
    return [float(completion == right) if right else None for completion, right in zip(completions, solution)]


def of_trl_either(prompts, completions, **kwargs):
    """Without annotations: what completions are follows from the prompts."""
    said = [c if isinstance(c, str) else c[0]["content"] + "!" for c in completions]
    return [float(s == (p if isinstance(p, str) else p[-1]["content"] + "!")) for p, s in zip(prompts, said)]


def of_trl_chat(prompts, completions: list[list[dict[str, str]]], **kwargs) -> list[float]:
    """And for chats."""
    return [float(completion[0]["content"] == prompt) for prompt, completion in zip(prompts, completions)]


def of_trl_typing(prompts, completions: List[List[Dict[str, str]]], **kwargs) -> List[float]:  # noqa: UP006
    """The same with the names of `typing`."""
    return of_trl_chat(prompts, completions)


def of_verl(data_source, solution_str, ground_truth, extra_info=None, score=1.0):
    """As verl's: a table, of which numbers are logged. `score` is its own default, not a field of the row."""
    right = solution_str == ground_truth
    return {"score": score * right, "acc": right, "split": extra_info["split"], "pred": solution_str}


def of_verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    """verl's batch manager."""
    return [float(s == g) for s, g in zip(solution_strs, ground_truths)]


async def awaited(answer, gold):
    """Waits as a request to a server does."""
    if answer == "hang":
        await asyncio.sleep(3600)
    if answer == "end":
        os._exit(3)
    if answer == "out of reach":
        raise Unjudged("nobody there")
    await asyncio.sleep(0.2)
    return float(answer == gold)


async def awaited_in_a_list(completions, **kwargs):
    """Asks a server for one after another; the reward says how many there were."""
    for completion in completions:
        await asyncio.sleep(3600 if completion == "hang" else 0.2)
    return [1 / len(completions)] * len(completions)


ONE_AT_A_TIME = asyncio.Lock()


async def one_at_a_time(answer, gold):
    """With a lock of the module's, as clients and their limits are."""
    async with ONE_AT_A_TIME:
        await asyncio.sleep(0.001)
        return float(answer == gold)


class Asking:
    """An object that is awaited."""

    async def __call__(self, answer, gold):
        return await one_at_a_time(answer, gold)


asking = Asking()


@functools.wraps(one_at_a_time)
def wrapped(*arguments, **named):
    """A plain function by its looks, as many decorators make of an async one."""
    return one_at_a_time(*arguments, **named)
