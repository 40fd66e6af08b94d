"""Sources of turns for a live engine: conversations of several turns that arrive in any order, abort or fail."""

import numpy as np
import torch.distributed as dist

from hacpo_mega.records import Completion
from hacpo_mega.rollout.engine import Engine
from hacpo_mega.rollout.vllm.engine_loop import TurnRequest
from hacpo_mega.rollout.vllm.row_noise import answer_seed

SAID = [11, 12, 13]  # what somebody else says between two turns


class Conversations:
    """Turns of conversations: the next one is asked when the last one ended, after `pause` calls of `take`."""

    def __init__(self, openings, *, num_turns: int = 1, at_once: int = 99, pause: int = 0, **how) -> None:
        """`at_once` bounds the conversations under way; `how` goes to every request."""
        self.waiting = [(index, 0, list(ids)) for index, ids in enumerate(openings)]
        self.num_turns, self.at_once, self.pause, self.how = num_turns, at_once, pause, how
        self.running: dict[str, tuple] = {}
        self.later: list[tuple[int, tuple]] = []
        self.turns: dict[str, Completion] = {}
        self.order: list[str] = []
        self.to_abort: list[str] = []
        self.num_calls, self.error = 0, None

    def take(self, idle: bool):
        self.num_calls += 1
        due = [turn for when, turn in self.later if when <= self.num_calls or idle]
        self.later = [(when, turn) for when, turn in self.later if turn not in due]
        room = max(0, self.at_once - len(self.running) - len(self.later) - len(due))
        due, self.waiting = due + self.waiting[:room], self.waiting[room:]
        requests = [self.request(*turn) for turn in due]
        self.running |= {request.key: turn for request, turn in zip(requests, due, strict=True)}
        aborted, self.to_abort = self.to_abort, []
        return requests, aborted

    def request(self, index: int, turn: int, ids: list[int]) -> TurnRequest:
        asked = {"max_tokens": 40, "temperature": 0.7, "seed": answer_seed(1, 0, index, 0, turn), **self.how}
        return TurnRequest(f"{index}/{turn}", ids, **asked)

    def give(self, key: str, completion: Completion) -> None:
        index, turn, ids = self.running.pop(key)
        self.turns[key] = completion
        self.order.append(key)
        if turn + 1 < self.num_turns:
            head = ids + completion.token_ids.tolist() + SAID
            self.later.append((self.num_calls + self.pause * (1 + index % 5), (index, turn + 1, head)))

    def fail(self, error: BaseException) -> None:
        self.error = error

    @property
    def is_done(self) -> bool:
        return not (self.waiting or self.running or self.later)


class Aborting(Conversations):
    """Aborts half of what runs once the first turn has ended, and what nobody has asked."""

    def give(self, key: str, completion: Completion) -> None:
        super().give(key, completion)
        if len(self.turns) == 1:
            self.to_abort = [*list(self.running)[::2], "nobody's"]


class Dying(Conversations):
    """A source that breaks while turns run."""

    def take(self, idle: bool):
        if self.num_calls == 5:
            raise OSError("the player is gone")
        return super().take(idle)


class Asking(Conversations):
    """Asks the engine for something else while it serves."""

    def __init__(self, openings, engine: Engine) -> None:
        super().__init__(openings)
        self.engine = engine

    def give(self, key: str, completion: Completion) -> None:
        super().give(key, completion)
        self.engine.generate([[1, 2]], [0], max_tokens=3)


def serve(engine: Engine, source: Conversations) -> dict:
    """Ended turns and errors; only the first rank of an engine of two has a source."""
    message, tally = "no error", None
    try:
        tally = engine.serve(source if dist.get_rank() == 0 else None)
    except (OSError, RuntimeError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"
    turns = {key: (done.token_ids, done.stop, done.logprobs) for key, done in source.turns.items()}
    return {"turns": turns, "order": source.order, "error": message, "told": str(source.error), "tally": tally}


def prefixes_in_use(engine: Engine) -> str:
    """The error of new weights while a request still runs, which nobody but a fault leaves behind."""
    with engine._guard.open() as llm:
        request = TurnRequest("left", [5, 6, 7], 1, 20)
        llm.llm_engine.add_request("left", {"prompt_token_ids": request.prompt_ids}, request.sampling([7]))
        llm.llm_engine.step()
    try:
        engine.sleep()
        return "no error"
    except RuntimeError as error:
        return str(error)
    finally:
        with engine._guard.open() as llm:
            llm.llm_engine.abort_request(["left"])


def seen_by(engine: Engine, prompts: list[list[int]]) -> dict:
    """One-turn requests in different company, conversations in three orders, aborts, a source that dies."""
    openings = [np.random.default_rng(n).integers(8, 131, 5 + 3 * n).tolist() for n in range(4)]
    talk = {"num_turns": 3, "max_tokens": 8}
    companion = Conversations(openings, at_once=1, **talk)
    seen = {
        "openings": openings,
        "odd rows": engine.odd_row_counts,
        "dribbling": serve(engine, Conversations(prompts[:10], at_once=4)),
        "all at once": serve(engine, Conversations(openings, **talk)),
        "one by one": serve(engine, Conversations(openings, at_once=1, **talk)),
        "apart": serve(engine, Conversations(openings, pause=3, at_once=4, **talk)),
        "aborted": serve(engine, Aborting(prompts)),
        "beyond": serve(engine, Conversations([prompts[0], [1, 131]])),
        "dead": serve(engine, Dying(openings, **talk)),
        "busy": prefixes_in_use(engine),
        "inside": serve(engine, Asking(prompts[:1], engine)),
    }
    engine.odd_row_counts = {1}  # as of a model with wide layers
    return seen | {"with a companion": serve(engine, companion)}
