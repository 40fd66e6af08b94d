"""Judging of an agent's rollouts: all at the end or, beside the engine, each as soon as it has ended.

Beside the engine, a thread passes ended answers to the judge, whose graders are processes of their own
(guarded_workers.py). A judgement depends on its answer alone, so it is the same either way. But a grader of the user's
own that has never worked is tried on the first answers of each batch, not of the step.

Elsewhere: what a judgement is (judge.py).
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from hacpo_grading.judge import AnyJudge, JudgeReport
from hacpo_grading.judgement import Asked
from hacpo_mega.config.tables.schema import RewardConfig
from hacpo_mega.grading.run_judge import environment_judgement
from hacpo_mega.records import EVENTS, Judgement, Prompt, Rollout

# Most answers in one call of the judge: ending the thread waits for one call at most.
MOST_AT_ONCE = 64
# Counts of a conversation that say why it was lost, beside the name of its environment's failure.
REASONS = ("unencodable", "too_long")

AnswerKey = tuple[int, int]  # prompt index, rollout index


class RolloutJudge(AbstractContextManager["RolloutJudge"]):
    """One cell's judge of rollouts, on its leader. A context manager, whose exit ends the thread.

    hidden_s   seconds of judging that the last `judge` did not have to wait for
    """

    def __init__(
        self,
        judge: AnyJudge,
        *,
        while_sampling: bool,
        is_leader: bool = True,
        agent: str = "",
        opened: Callable[[str], str] = lambda _prompt: "",
        of_environment: Callable[[float | None], Judgement] = partial(environment_judgement, RewardConfig()),  # noqa: B008
        last_error: Callable[[], str] = str,
    ) -> None:
        """`agent` writes the answers. `opened` returns the start of an answer that a prompt, as the agent reads it,
        already contains (a <think>): it is judged as part of the answer. Turns of a conversation know theirs.
        `of_environment` judges a conversation by its environment's reward; the judge is asked about those without one.
        `last_error` is the text of the environment's last failure in this process, by its name.

        `while_sampling` asks for judging beside the engine. A grader in this process cannot do that, nor one that
        compares the answers of a group. On other ranks than the leader it judges nothing: only the leader needs
        judgements.
        """
        self._judge, self._is_leader, self._agent, self._opened = judge, is_leader, agent, opened
        self._of_environment, self._last_error = of_environment, last_error
        self._settled = JudgeReport()  # of conversations that no judge was asked about, since the last report
        self._goes_beside = while_sampling and is_leader and judge.has_workers and not judge.compares_groups
        self._ended: queue.SimpleQueue[tuple[Prompt, Rollout] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_leaving = False
        self._found: dict[AnswerKey, Judgement] = {}
        self._error: BaseException | None = None
        self._judged_s = self.hidden_s = 0.0

    @property
    def on_answer(self) -> Callable[[Prompt, Rollout], None] | None:
        """Callback for an answer that has ended while others have not; None if judging waits for all."""
        return self._begin if self._goes_beside else None

    def _begin(self, prompt: Prompt, rollout: Rollout) -> None:
        if _is_settled(rollout):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="judge", daemon=True)
            self._thread.start()
        self._ended.put((prompt, rollout))

    def judge(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[Judgement]:
        """One judgement per rollout, in order; `prompts` are the answered ones. Waits for judging in progress.

        An empty list on other ranks than the leader.
        """
        if not self._is_leader:
            return []
        found = self._finish()
        by_index = {prompt.index: prompt for prompt in prompts}
        settled = [rollout for rollout in rollouts if _is_settled(rollout)]
        found = {**found, **{_key(r): self._of_environment(r.conversation.reward) for r in settled}}
        # A role that was not reached is nobody's failure.
        lost = [r for r in settled if not (found[_key(r)].is_judged or "silent" in r.conversation.counts)]
        errors = Counter(map(self._lost, lost))
        self._settled = JudgeReport(num_answers=len(settled), num_unjudged=len(lost), errors=errors)
        rest = [rollout for rollout in rollouts if _key(rollout) not in found]
        judged = self._judge_all([(by_index[rollout.prompt_index], rollout) for rollout in rest])
        return [(found | judged)[_key(rollout)] for rollout in rollouts]

    def take_report(self) -> JudgeReport:
        """Problems since the last report, and the seconds that the last `judge` did not have to wait for.

        Conversations that their environment left unjudged count as answers that a grader did.
        """
        report, mine, self._settled = self._judge.take_report(), self._settled, JudgeReport()
        added = {name: getattr(report, name) + getattr(mine, name) for name in ("num_answers", "num_unjudged")}
        return replace(report, hidden_s=self.hidden_s, errors={**report.errors, **mine.errors}, **added)

    def _lost(self, rollout: Rollout) -> str:
        """The reason why an environment left a conversation unjudged."""
        talk = rollout.conversation
        if talk.reward is not None:
            return "the environment's reward lies outside reward.range"
        names = [name for name in talk.counts if name in REASONS or name not in (*EVENTS, "environment_ms")]
        last = self._last_error()
        of_last = last if last.partition(":")[0] in names else ", ".join(names)
        return f"a conversation failed ({of_last or 'no turn was taken'})"

    def _judge_all(self, asked: Sequence[tuple[Prompt, Rollout]]) -> dict[AnswerKey, Judgement]:
        judgements = self._judge.judge([self._question(prompt, rollout) for prompt, rollout in asked])
        return {_key(rollout): judgement for (_, rollout), judgement in zip(asked, judgements, strict=True)}

    def _question(self, prompt: Prompt, rollout: Rollout) -> Asked:
        talk = rollout.conversation
        answer = (self._opened(prompt.text) if talk is None else talk.answer.opened) + rollout.text
        return Asked(prompt.text, answer, prompt.gold, rollout.stop, prompt.row, self._agent, prompt.index)

    def _run(self) -> None:
        """Thread: judges the answers that have ended since its last look, until there are no more."""
        asked: list[tuple[Prompt, Rollout] | None] = []
        try:
            while None not in asked and not self._is_leaving:
                asked = [self._ended.get()]
                while len(asked) < MOST_AT_ONCE and not self._ended.empty():
                    asked.append(self._ended.get())
                start = time.monotonic()
                self._found |= self._judge_all([answer for answer in asked if answer is not None])
                self._judged_s += time.monotonic() - start
        except BaseException as error:  # raised again by `_finish`
            self._error = error

    def _finish(self) -> Mapping[AnswerKey, Judgement]:
        """Ends the thread and takes its judgements; raises the error that ended it."""
        start = time.monotonic()
        self._end_thread()
        self.hidden_s = max(0.0, self._judged_s - (time.monotonic() - start))
        error, found = self._error, self._found
        self._error, self._found, self._judged_s = None, {}, 0.0
        if error is not None:
            raise error
        return found

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._ended.put(None)
            self._thread.join()
            self._thread = None

    def __exit__(self, *exception: object) -> None:
        self._is_leaving = True
        self._end_thread()


def _is_settled(rollout: Rollout) -> bool:
    return rollout.conversation is not None and rollout.conversation.is_settled


def _key(rollout: Rollout) -> AnswerKey:
    return rollout.prompt_index, rollout.rollout_index
