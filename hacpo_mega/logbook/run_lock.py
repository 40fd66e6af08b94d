"""One writer per folder, whatever it is called: a lock beside it and one inside it. Imports no torch.

    .NAME.lock   beside the folder that all links lead to: holds while there is no folder, or it is moved away
    NAME/.lock   inside it: holds for whoever reaches the same folder by another way (a bind mount, another name)

Both say who holds them. The kernel drops a lock (flock) when its process ends, however it ends. Where a file system has
no locks, the file itself is the lock: made by one process alone (O_EXCL) and removed by it. A file that a killed
process has left is taken over as soon as that process is seen to be gone on this machine, or, if it was another's, when
it gave no sign for QUIET_S seconds: a holder touches its files every BEAT_S. Somebody may still delete them by hand, or
have stopped a process for so long; so who holds a folder asks before it writes whether it still does (`is_lost`).
"""

import datetime
import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from hacpo_mega.config.run_dirs import LOCK
from hacpo_mega.models.visible import say

# What a file system answers that has no locks (some network mounts).
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
BEAT_S = 10.0
QUIET_S = 90.0  # a network file system may show others a sign as late as 60 s
OPENING = os.O_RDWR | os.O_NOFOLLOW  # never what a planted link leads to
MOST_TRIES = 5


class Held(Exception):
    """Another job has the lock; its text says who."""


class RunLock:
    """The right of this process to write a folder: a job's rank 0 a run's, a queue that of its runs. A context.

    path    the lock beside the folder      token   what the files of this holder say, and no other's
    """

    def __init__(self, run_dir: Path, key: str = "run_dir") -> None:
        """Raises ValueError, naming host, process and start, when another job writes `run_dir`; `key` set it."""
        self._given, self._key = run_dir, key
        self.folder = Path(os.path.realpath(run_dir))
        self.path = self.folder.with_name(f".{self.folder.name}.lock")
        self.token = secrets.token_hex(16)
        self._files: dict[Path, _LockFile] = {}
        self._identity: tuple[int, int] | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._cannot(error) from error
        self._take(self.path)
        if self.folder.is_dir():
            self.enter()
        self._ends = threading.Event()
        threading.Thread(target=self._beat, name="run lock", daemon=True).start()

    def enter(self, aside: Path | None = None) -> None:
        """Takes the lock inside the folder, which exists now; `aside` is where the one before it has been moved to."""
        inside = self.folder / LOCK
        if aside is not None and (old := self._files.pop(inside, None)):
            old.release(aside / LOCK)
        if inside not in self._files:
            self._take(inside)
        self._identity = _identity(self.folder)

    def is_lost(self) -> bool:
        """Whether the folder is there and no longer this holder's: its lock was deleted, or another job has taken it.

        A folder that is away, or another one in its place, is no loss: it may come back.
        """
        is_there = self._identity is not None and _identity(self.folder) == self._identity
        return is_there and not_the_folder(self.folder, self.token) is not None

    def _take(self, path: Path) -> None:
        try:
            self._files[path] = _LockFile(path, self.token)
        except Held as holder:
            self._release()
            raise ValueError(
                f"{self._key} {self._given} is being written by {holder}: wait for it, end it, or give another "
                f"{self._key}"
            ) from holder
        except OSError as error:
            self._release()
            raise self._cannot(error) from error

    def _cannot(self, error: OSError) -> ValueError:
        return ValueError(
            f"{self._key} {self._given} cannot be locked ({error.strerror}: {error.filename or self.path}): make room "
            f"there, or give a folder that you may write"
        )

    def _beat(self) -> None:
        while not self._ends.wait(BEAT_S):
            for file in list(self._files.values()):
                file.touch()

    def _release(self) -> None:
        for path, file in self._files.items():
            file.release(path)
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._release()


def not_the_folder(folder: Path, token: str) -> str | None:
    """Why a folder is not, or not now, the one that the holder of `token` has opened; None when it is."""
    try:
        if token in (folder / LOCK).read_text(encoding="utf-8", errors="replace"):
            return None
        why = "another one is there"
    except OSError as error:
        why = str(error.strerror)
    return f"{folder} is not the folder that this run opened ({why}): it was moved, removed or unmounted"


class _LockFile:
    """One file that says who holds it. Held while it is another's; OSError where it cannot be made or written."""

    def __init__(self, path: Path, token: str) -> None:
        self._token = token
        for _ in range(MOST_TRIES):
            # Not there any more, or there now: released, made or taken over between two looks at it.
            with suppress(FileNotFoundError, FileExistsError):
                if self._has_taken(path):
                    break
        else:
            raise Held("a job that begins at this moment")
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, signature(token).encode(), 0)
        except OSError:
            self.release(path)
            raise

    def touch(self) -> None:
        """Gives a sign of life."""
        with suppress(OSError):  # read-only or away for a while, which whoever writes there says
            os.utime(self._descriptor)

    def release(self, path: Path) -> None:
        """Gives the lock up; `path` is where the file lies by now."""
        with suppress(OSError):  # gone with its disk: then nothing is held there
            if self._is_locked:
                os.ftruncate(self._descriptor, 0)
            elif _identity(path) == _identity(self._descriptor):
                path.unlink()
        os.close(self._descriptor)

    def _has_taken(self, path: Path) -> bool:
        """Whether the file is this process's now; if not, look again. Held while it is another's."""
        is_new = not os.path.lexists(path)
        self._descriptor = os.open(path, OPENING | (os.O_CREAT | os.O_EXCL if is_new else 0), 0o644)
        try:
            self._is_locked = _lock(self._descriptor)
            if self._is_locked:
                _require_silence(path, self._descriptor)
                is_mine = _identity(path) == _identity(self._descriptor)
            else:
                is_mine = is_new or _take_over(path, self._descriptor, self._token)
        except BaseException:
            os.close(self._descriptor)
            raise
        if not is_mine:
            os.close(self._descriptor)
        return is_mine


def _lock(descriptor: int) -> bool:
    """Locks an open file; False where its file system has no locks. Held when another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Held(_holder(descriptor)) from error
    except OSError as error:
        if error.errno in NO_LOCKS:
            return False
        raise
    return True


def _require_silence(path: Path, descriptor: int) -> None:
    """Held when a process of another machine goes on touching a file that is locked here: its locks hold there alone.

    Costs nothing where the last holder gave its lock up, was of this machine, or has been silent for QUIET_S already.
    """
    said = _signature_in(descriptor)
    if said is None or said["space"] == _space():
        return
    touched_s = os.fstat(descriptor).st_mtime
    os.utime(descriptor)  # by one clock with the other's
    if os.fstat(descriptor).st_mtime - touched_s < QUIET_S and _gives_signs(path, 3 * BEAT_S):
        raise Held(_holder(descriptor))


def _take_over(path: Path, descriptor: int, token: str) -> bool:
    """Takes a file that is a lock out of the way, if whoever made it is gone; False: it can be made now. Else Held."""
    said = _signature_in(descriptor)
    is_alive = (
        _start_of(said["pid"]) == said["start"]
        if said is not None and said["space"] == _space()
        else _gives_signs(path, QUIET_S)
    )
    if is_alive:
        raise Held(_holder(descriptor))
    aside = path.with_name(f"{path.name}.{token}")
    path.rename(aside)
    if _identity(aside) != _identity(descriptor):  # it has been taken over meanwhile: that one's goes back
        with suppress(FileExistsError):
            os.link(aside, path)
        aside.unlink()
        raise Held("a job that begins at this moment")
    aside.unlink()
    return False


def _gives_signs(path: Path, seconds: float) -> bool:
    """Whether a file is touched or written in so many seconds, which are waited. FileNotFoundError when it goes."""
    before, deadline = _sign(path), time.monotonic() + seconds
    say(f"{path} may be another machine's: waiting for a sign of it, {seconds:.0f} s at most", file=sys.stderr)
    while time.monotonic() < deadline:
        time.sleep(min(1.0, seconds / 10))
        if _sign(path) != before:
            return True
    return False


def _sign(path: Path) -> tuple[int, int, int]:
    with path.open("rb") as file:  # opened: a network file system then asks its server
        found = os.fstat(file.fileno())
    return found.st_ino, found.st_mtime_ns, found.st_size


def is_gone(said: str) -> bool:
    """Whether a `signature` is known to be of a process that has ended; one of another machine may live."""
    found = _known(said)
    return found is not None and found["space"] == _space() and _start_of(found["pid"]) != found["start"]


def signature(token: str) -> str:
    """What a lock says: a line for people, and one by which its process is known."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    process = os.getpid()
    known = {"token": token, "space": _space(), "pid": process, "start": _start_of(process)}
    return f"process {process} on {socket.gethostname()} since {now}\n{json.dumps(known)}\n"


def _signature_in(descriptor: int) -> dict[str, Any] | None:
    return _known(os.pread(descriptor, 4096, 0).decode(errors="replace"))


def _known(said: str) -> dict[str, Any] | None:
    """What the second line of a signature says; None when nobody holds it, or somebody has not yet said so."""
    with suppress(ValueError, IndexError, KeyError, TypeError):  # then it is not one of ours
        known = json.loads(said.split("\n")[1])
        return {key: known[key] for key in ("space", "pid", "start")}
    return None


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 4096, 0).decode(errors="replace").partition("\n")[0] or "another job"


def _space() -> str:
    """Within what a process's number and start tell whether it lives: this boot of the machine, and this container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _start_of(process: int) -> str | None:
    """When a process began, in ticks since the boot; None for one that is gone, or dead and not yet buried."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _identity(path: Path | int) -> tuple[int, int] | None:
    """By which the kernel knows a file or a folder; None when there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
