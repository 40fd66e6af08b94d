"""One writer per folder: a lock that the kernel drops when its process ends, however it ends."""

import datetime
import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import Self

# What a file system answers that has no locks (some network mounts).
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class RunLock:
    """The right of this process to write a folder: a job's rank 0 a run's, a queue that of its runs. A context.

    A lock (flock) on the hidden file `.NAME.lock` beside the folder, which also says who holds it: the folder itself
    may be moved aside meanwhile. A killed process leaves nothing behind that would keep the next one out.
    """

    def __init__(self, run_dir: Path, key: str = "run_dir") -> None:
        """Raises ValueError, naming host, process and start, when another job writes `run_dir`; `key` set it."""
        self.path = run_dir.with_name(f".{run_dir.name}.lock")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return
            self._file.seek(0)
            holder = self._file.read().strip() or "another job"
            self._file.close()
            raise ValueError(
                f"{key} {run_dir} is being written by {holder}: wait for it, end it, or give another {key}"
            ) from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()} since {_now()}\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
