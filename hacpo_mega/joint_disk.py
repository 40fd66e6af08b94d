"""What all ranks of a job do when the disk refuses: everybody hears of it, and the end of a run waits for room.

What one rank finds must not end its part in a collective that the others are in: problems are agreed upon, then told.
Not here: sizes (disk_space.py), logs that wait (logbook/backlog.py), and what a checkpoint is (joint_checkpoint.py).
"""

import time
from collections.abc import Callable
from typing import Any

from hacpo_mega.agent import Agent
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.watchdog import RunStopped
from hacpo_mega.config import Config
from hacpo_mega.disk_space import export_bytes, require_bytes
from hacpo_mega.logbook.run_folder import RunFolder

# Between two attempts at the end of a run.
RETRY_S = 5.0


class JointDisk:
    """The disk of a run, as the ranks of its job find it together.

    logs   what this rank writes into the run folder     say   told what a person should know, on every rank
    """

    def __init__(self, place: Place, config: Config, logs: RunFolder, say: Callable[[str], None]) -> None:
        self._place, self._config, self._logs, self.say = place, config, logs, say

    def require_logs(self) -> None:
        """OSError on every rank while logs of any rank wait to be written. Collective."""
        self.agree(self._logs.unwritten())

    def attempt(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls it on every rank; OSError on every rank when one of them got one. Collective.

        What `function` does may be collective only if it fails on all ranks of its group or on none.
        """
        self.agree(_refusal(function, *arguments))

    def agree(self, problem: str | None) -> None:
        """OSError on every rank of the job, with the first problem that any of them has. Collective."""
        if found := self._place.first_said(problem):
            raise OSError(found)

    def patiently(self, function: Callable[[], None]) -> None:
        """Calls what fails on all ranks or on none, until it does not or `wait_for_room_s` have passed; then OSError.

        For what ends a run: given up at once, its weights would be lost to a disk that somebody can clear.
        """
        deadline, is_said = time.monotonic() + self._config.checkpoint.wait_for_room_s, False
        while True:
            try:
                return function()
            except OSError as problem:
                left_s = max(0.0, deadline - time.monotonic())
                if self._place.share_in_job(b"1" if left_s else b"") == b"":  # clocks differ: one of them decides
                    raise
                if not is_said:
                    self.say(f"warning: {problem}: waiting for room, for {left_s:.0f} s at most")
            is_said = True
            time.sleep(min(RETRY_S, left_s))

    def export(self, agent: Agent, safe_step: int) -> None:
        """Writes every agent as a Hugging Face folder. RunStopped where the disk has had no room for long."""
        try:
            self.patiently(lambda: self._export(agent))
        except OSError as problem:
            raise RunStopped(
                f"the agents are not exported: {problem}; step {safe_step} is safe. Make room, start the run again"
            ) from problem

    def _export(self, agent: Agent) -> None:
        run_dir = self._config.run_dir
        self.attempt(require_bytes, export_bytes(self._config), run_dir)
        self.require_logs()
        self.attempt(agent.export, run_dir / "agents" / agent.name)
        self.attempt(self._logs.finish, self._config.num_steps)


def _refusal(function: Callable[..., None], *arguments: Any) -> str | None:
    """What the disk says to a call; None when it was done."""
    try:
        function(*arguments)
    except OSError as error:
        return str(error)
    return None
