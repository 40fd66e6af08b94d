"""Disk errors of a job: all ranks learn of one, and the end of a run waits for room.

A rank must not leave a collective that the others are in: problems are agreed on first, then raised. A run waits only
for problems that a person or the machine may mend (MENDABLE); any other, such as a name that is too long, ends it at
once.

Elsewhere: sizes (disk_space.py), unwritten logs (logbook/files/backlog.py), checkpoints (joint_checkpoint.py).
"""

import errno
import time
from collections.abc import Callable
from typing import Any

from hacpo_mega.agent.agent import Agent
from hacpo_mega.checkpoint.disk_space import export_bytes, require_bytes
from hacpo_mega.checkpoint.files import RECORD, folder_of
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.watchdog import RunStopped
from hacpo_mega.config import Config
from hacpo_mega.logbook.run.run_folder import RunFolder

# Between two attempts at the end of a run.
RETRY_S = 5.0
# Lowest speed of a working file system: ranks wait for an export for its bytes over this, plus `wait_s`.
SLOWEST_BYTES_PER_S = 50e6
MENDABLE = frozenset(
    (
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),  # room, quota, a limit on the size of files
        *(errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.EBUSY),  # failing, or without access for now
        *(errno.ENOENT, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN),  # not mounted
        *(errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.ECONNRESET),
        *(errno.EAGAIN, errno.EINTR, errno.ENOMEM),
    )
)


class JointDisk:
    """The disk of a run, as all ranks of its job see it.

    logs      this rank's writer into the run folder     say   prints a message for a person, on every rank
    is_away   whether, at the last check, any rank found another folder at `run_dir`, or none
    """

    def __init__(self, place: Place, config: Config, logs: RunFolder, say: Callable[[str], None]) -> None:
        self._place, self._config, self._logs, self.say = place, config, logs, say
        self.is_away = False
        self._write_s = export_bytes(config) / SLOWEST_BYTES_PER_S  # read now: a model's folder may be moved later

    def require_logs(self) -> None:
        """OSError on every rank while any rank has unwritten logs, or the run's folder is away. Collective."""
        self.require_folder()
        self.agree(self._logs.unwritten())

    def require_folder(self) -> None:
        """OSError on every rank if `run_dir` is not the folder that the run opened, on any rank. Collective.

        RunStopped if another job has taken it.
        """
        problem = self._place.first_message(self._logs.misplaced())
        self.is_away = problem is not None
        if problem:
            raise disk_error(errno.ESTALE, problem)

    def attempt(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls `function` on every rank; OSError on every rank if one of them got one. Collective.

        `function` may contain a collective only if it fails on all ranks of its group or on none.
        """
        self.agree(*_refusal(function, *arguments))

    def attempt_write(self, function: Callable[..., None], *arguments: Any) -> None:
        """`attempt` for a function that writes a model or its state: ranks meet after it, however slow the disk is."""
        refusal = _refusal(function, *arguments)
        self._place.meet(self._write_s)
        self.agree(*refusal)

    def agree(self, problem: str | None, number: int | None = None) -> None:
        """OSError on every rank of the job, with the first problem of any of them. Collective.

        `number` is the kernel's errno; a problem without one counts as a full disk, and so as one to wait for.
        """
        if first := self._place.first_message(problem and f"{number or 0} {problem}"):
            code, _, text = first.partition(" ")
            raise disk_error(int(code), text)

    def has(self, step: int) -> bool:
        """True if this process finds the checkpoint of a step in `run_dir`; step 0 needs none."""
        return step == 0 or (folder_of(self._config.run_dir, step) / RECORD).exists()

    def outlook(self, safe_step: int) -> str:
        """Text on which step is safe, and where: the end of a line that reports a failure."""
        if self.is_away or not self.has(safe_step):
            return f"step {safe_step} was safe in the folder that was there: put it back"
        return f"step {safe_step} is safe"

    def patiently(self, function: Callable[[], None]) -> None:
        """Retries `function`, which fails on all ranks or none, until it succeeds or `wait_for_room_s` are over.

        Raises at once an error that is not MENDABLE. For the end of a run: a disk that can be cleared must not cost its
        weights.
        """
        deadline, is_said = time.monotonic() + self._config.checkpoint.wait_for_room_s, False
        while True:
            try:
                return function()
            except OSError as problem:
                if problem.errno not in MENDABLE:
                    raise
                left_s = max(0.0, deadline - time.monotonic())
                if self._place.share_in_job(b"1" if left_s else b"") == b"":  # clocks differ: rank 0's decides
                    raise
                if not is_said:
                    self.say(f"warning: {problem}: waiting for room, for {left_s:.0f} s at most")
            is_said = True
            time.sleep(min(RETRY_S, left_s))

    def export(self, agent: Agent | None, safe_step: int, problem: str | None) -> None:
        """Writes every agent as a Hugging Face folder. RunStopped if the disk has had no room for too long.

        `problem` is why the last step could not be saved. The wait for room is over then: the agents are exported
        without another one, and RunStopped follows.
        """
        try:
            if problem is None:
                self.patiently(lambda: self._export(agent))
            else:
                self._export(agent)
        except OSError as error:
            raise RunStopped(
                f"the agents are not exported: {error}; {self.outlook(safe_step)}. Make room, start the run again"
            ) from error
        if problem is not None:
            raise RunStopped(f"{problem}. The agents are exported. Make room, start the run again for its last steps")

    def _export(self, agent: Agent | None) -> None:
        run_dir = self._config.run_dir
        self.require_folder()
        self.attempt(require_bytes, export_bytes(self._config), run_dir)
        self.require_logs()
        self.attempt_write(lambda: agent and agent.export(run_dir / "agents" / agent.name))
        self.attempt(self._logs.finish, self._config.num_steps)


def _refusal(function: Callable[..., None], *arguments: Any) -> tuple[str | None, int | None]:
    """Message and errno of the OSError that a call raises; None when it succeeds."""
    try:
        function(*arguments)
    except OSError as error:
        return str(error), error.errno
    return None, None


def disk_error(number: int | None, text: str) -> OSError:
    """An OSError with only `text` as its message, and an errno; by default that of a full disk."""
    problem = OSError(text)
    problem.errno = number or errno.ENOSPC
    return problem
