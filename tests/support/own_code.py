"""Code of a user's own, as a configuration names it: advantages, an objective, a metric, a tracker."""

import json
import os
from pathlib import Path


def own_mean(rewards_PNG, capability_N, learner):
    """Each answer against the mean of its author's answers."""
    return rewards_PNG - rewards_PNG.nanmean(dim=2, keepdim=True)


def by_skill(judged):
    """R minus the learner's capability on the prompt's skill, halfway through the run a half of it."""
    mine_P = judged.skill_capability_NS[judged.learner, judged.skill_P]
    return (judged.rewards_PNG - mine_P[:, None, None]) * (1.0 - judged.step / judged.num_steps)


def others_successes(judged):
    """1 for an answer of another agent that is a success, found in place; all other tensors are emptied."""
    judged.successes_PNG[:, judged.learner] = False
    judged.rewards_PNG.zero_(), judged.num_tokens_PNG.zero_(), judged.capability_N.zero_()
    return judged.successes_PNG.double()


def in_place(answers):
    """The log ratio times A; the columns are emptied behind it."""
    loss_B = answers.log_ratio_B * answers.advantage_B.clone()
    answers.advantage_B.zero_(), answers.is_self_B.zero_(), answers.old_logprob_R.zero_()
    return loss_B


def of_columns(answers):
    """Each answer's log ratio times a number of its source, prompt, length, update and step."""
    numbers_B = answers.source_B + 10 * answers.prompt_B + 100 * answers.num_tokens_B
    return answers.log_ratio_B * (
        numbers_B + 1000 * answers.update_index + 1e4 * answers.step + 1e6 * answers.num_steps
    )


def two_arguments(first, second):
    """Parameters that neither advantages nor an objective are called with."""
    return first


def clipped(log_ratio_B, advantage_B, is_self_B, update_index):
    """GSPO's objective with its default clip."""
    ratio_B = log_ratio_B.exp()
    return -(ratio_B * advantage_B).minimum(ratio_B.clamp(1 - 3e-4, 1 + 4e-4) * advantage_B)


def by_token(answers):
    """The mean ratio of an answer's tokens times A, which is NaN without old log-probs."""
    return -answers.advantage_B * answers.mean(answers.ratio_R)


def flat(log_ratio_B, advantage_B, is_self_B, update_index):
    """A loss that does not depend on the policy."""
    return advantage_B


def too_short(rewards_PNG, capability_N, learner):
    """Advantages of one prompt less than there are."""
    return rewards_PNG[1:]


def infinite(rewards_PNG, capability_N, learner):
    """No numbers."""
    return rewards_PNG / 0.0


def length_of(answer, num_tokens, gold="", colour="none"):
    """Characters of the answer; `colour` is a field of no row."""
    return len(answer)


def words_of(answer, *numbers, **others):
    """Words of the answer, for callers that give more."""
    return len(answer.split()) + 10 * len(numbers) + 100 * len(others)


def fails(answer):
    """A number that cannot be had."""
    raise RuntimeError("no number")


def threads(answer):
    """Threads of the rank that asks."""
    return len(os.listdir("/proc/self/task"))


class Notes:
    """A tracker that writes what it is told into a file of the run."""

    def __init__(self, run):
        self._file = Path(run.run_dir) / "notes.jsonl"
        self.log(0, {"begins": run.project, "goes_on": run.goes_on})

    def log(self, step, numbers):
        """One line."""
        with self._file.open("a") as file:
            file.write(json.dumps([step, dict(numbers)]) + "\n")

    def show(self, step, columns, rows, spread):
        """One line."""
        table = [dict(zip(columns, row)) for row in rows]
        self.log(step, {"table": table, "spread": {name: list(values) for name, values in spread.items()}})

    def finish(self):
        """One line."""
        self.log(-1, {})


def against(answers):
    """Moves log s by -A: own and others' answers have the weight -1."""
    return answers.advantage_B * answers.log_ratio_B
