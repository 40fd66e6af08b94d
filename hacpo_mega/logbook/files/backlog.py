"""Writes into a run folder that may be full, read-only or away for a while: now, or as soon as possible.

A failed write stays in memory, as do all after it, in order, until they fit; this is reported once, and again when all
is written. A half-written record is overwritten, so nothing is doubled or missing. A folder that is not the one the run
opened is waited for, and so is a missing file that had lines. Elsewhere: checkpoints, which are never put off
(joint_checkpoint.py), and the content of the files.
"""

import errno
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hacpo_mega.models.files.replacing import replace_file

# Limit of waiting text: a step's answers are some megabytes, so it is reached after hundreds of steps without a write.
MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class _Write:
    path: Path
    content: bytes
    replaces: bool  # the file, whole or not at all; else `content` is added at its end


class Backlog:
    """The writes of one process. `say` is called when they begin to fail, and when all are on disk again.

    `misplaced` gives, before every write, the reason why the run's folder is another one, or None: its disk may be
    away, with an empty mount point there.
    """

    def __init__(
        self,
        say: Callable[[str], None] = lambda text: None,
        max_bytes: int = MAX_BYTES,
        misplaced: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._say, self._max_bytes, self._misplaced = say, max_bytes, misplaced
        self._waiting: deque[_Write] = deque()
        self._lengths: dict[Path, int] = {}  # of the files that lines are added to, up to the last good write
        self._error: OSError | None = None

    def append(self, path: Path, content: bytes) -> None:
        """Adds to the end of a file, which this process alone writes. OSError when too much is waiting already."""
        self._add(_Write(path, content, replaces=False))

    def replace(self, path: Path, content: bytes) -> None:
        """Writes a file, whole or not at all, into a folder that exists. OSError when too much is waiting already."""
        self._add(_Write(path, content, replaces=True))

    def flush(self) -> OSError | None:
        """Writes as many waiting records as it can; returns why some are left, or None."""
        try:
            while self._waiting:
                if reason := self._misplaced():
                    raise OSError(errno.ESTALE, reason)
                self._write(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if self._error is None:
                self._say(
                    f"warning: {self._waiting[0].path} cannot be written ({error.strerror}): logs stay in memory, up "
                    f"to {self._max_bytes} bytes, until they can be; there is no checkpoint before"
                )
            self._error = error
            return error
        if self._error is not None:
            self._say("the logs are written again; no line is missing")
        self._error = None
        return None

    def _add(self, write: _Write) -> None:
        self._waiting.append(write)
        if (error := self.flush()) and sum(len(write.content) for write in self._waiting) > self._max_bytes:
            raise OSError(
                error.errno, f"{error.strerror}, and more than {self._max_bytes} bytes of logs wait for it", write.path
            )

    def _write(self, write: _Write) -> None:
        if write.replaces:
            replace_file(write.path, write.content, synced=True)
            return
        length = self._lengths.get(write.path)  # None before the first write, when the file is an earlier start's
        with write.path.open("r+b" if length or write.path.exists() else "xb", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            self._lengths[write.path] = length = end if length is None else min(length, end)
            file.truncate(length)  # drops the rest of an earlier failed write
            file.seek(length)
            left = memoryview(write.content)
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        self._lengths[write.path] = length + len(write.content)
