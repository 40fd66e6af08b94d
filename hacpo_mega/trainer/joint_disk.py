"""What all ranks of a job do when the disk refuses: everybody hears of it, and the end of a run waits for room.

What one rank finds must not end its part in a collective that the others are in: problems are agreed upon, then told.
Waited for is what a person or the machine may mend meanwhile (MENDABLE); anything else, such as a name that is too
long, ends the run at once. Not here: sizes (disk_space.py), logs that wait (logbook/files/backlog.py), and what a
checkpoint is (joint_checkpoint.py).
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
MENDABLE = frozenset(
    (
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),  # room, quota, a limit on the size of files
        *(errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.EBUSY),  # out of order, or closed for now
        *(errno.ENOENT, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN),  # away
        *(errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.ECONNRESET),
        *(errno.EAGAIN, errno.EINTR, errno.ENOMEM),
    )
)


class JointDisk:
    """The disk of a run, as the ranks of its job find it together.

    logs      what this rank writes into the run folder     say   told what a person should know, on every rank
    is_away   whether, when last looked at, another folder or none was at `run_dir` for any rank
    """

    def __init__(self, place: Place, config: Config, logs: RunFolder, say: Callable[[str], None]) -> None:
        self._place, self._config, self._logs, self.say = place, config, logs, say
        self.is_away = False

    def require_logs(self) -> None:
        """OSError on every rank while logs of any rank wait to be written, or the run's folder is away. Collective."""
        self.require_folder()
        self.agree(self._logs.unwritten())

    def require_folder(self) -> None:
        """OSError on every rank where `run_dir` is not the folder that the run opened, for any of them. Collective.

        RunStopped where it is another job's by now.
        """
        found = self._place.first_message(self._logs.misplaced())
        self.is_away = found is not None
        if found:
            raise disk_error(errno.ESTALE, found)

    def attempt(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls it on every rank; OSError on every rank when one of them got one. Collective.

        What `function` does may be collective only if it fails on all ranks of its group or on none.
        """
        self.agree(*_refusal(function, *arguments))

    def agree(self, problem: str | None, number: int | None = None) -> None:
        """OSError on every rank of the job, with the first problem that any of them has. Collective.

        `number` is the kernel's for it; without one it is of those that are waited for.
        """
        if found := self._place.first_message(problem and f"{number or 0} {problem}"):
            said, _, text = found.partition(" ")
            raise disk_error(int(said), text)

    def has(self, step: int) -> bool:
        """Whether this process finds the checkpoint of a step in `run_dir`; a run's start needs none."""
        return step == 0 or (folder_of(self._config.run_dir, step) / RECORD).exists()

    def outlook(self, safe_step: int) -> str:
        """Which step is safe, and where, as the end of a line that says what failed."""
        if self.is_away or not self.has(safe_step):
            return f"step {safe_step} was safe in the folder that was there: put it back"
        return f"step {safe_step} is safe"

    def patiently(self, function: Callable[[], None]) -> None:
        """Calls what fails on all ranks or on none, until it does not or `wait_for_room_s` have passed; then OSError.

        At once where waiting mends nothing. For what ends a run: its weights would be lost to a disk one can clear.
        """
        deadline, is_said = time.monotonic() + self._config.checkpoint.wait_for_room_s, False
        while True:
            try:
                return function()
            except OSError as problem:
                if problem.errno not in MENDABLE:
                    raise
                left_s = max(0.0, deadline - time.monotonic())
                if self._place.share_in_job(b"1" if left_s else b"") == b"":  # clocks differ: one of them decides
                    raise
                if not is_said:
                    self.say(f"warning: {problem}: waiting for room, for {left_s:.0f} s at most")
            is_said = True
            time.sleep(min(RETRY_S, left_s))

    def export(self, agent: Agent, safe_step: int, lost: str | None) -> None:
        """Writes every agent as a Hugging Face folder. RunStopped where the disk has had no room for long.

        `lost` is why the last step could not be kept, for which the run has waited already: RunStopped with the export.
        """
        try:
            if lost is None:
                self.patiently(lambda: self._export(agent))
            else:
                self._export(agent)
        except OSError as problem:
            raise RunStopped(
                f"the agents are not exported: {problem}; {self.outlook(safe_step)}. Make room, start the run again"
            ) from problem
        if lost is not None:
            raise RunStopped(f"{lost}. The agents are exported. Make room, start the run again for its last steps")

    def _export(self, agent: Agent) -> None:
        run_dir = self._config.run_dir
        self.require_folder()
        self.attempt(require_bytes, export_bytes(self._config), run_dir)
        self.require_logs()
        self.attempt(agent.export, run_dir / "agents" / agent.name)
        self.attempt(self._logs.finish, self._config.num_steps)


def _refusal(function: Callable[..., None], *arguments: Any) -> tuple[str | None, int | None]:
    """What the disk says to a call, and the kernel's number for it; None when it was done."""
    try:
        function(*arguments)
    except OSError as error:
        return str(error), error.errno
    return None, None


def disk_error(number: int | None, text: str) -> OSError:
    """An error that says only `text`, and carries the kernel's number; without one that of a full disk."""
    problem = OSError(text)
    problem.errno = number or errno.ENOSPC
    return problem
