"""One writer per folder, whatever it is called: a lock beside it and one inside it. Imports no torch.

    .NAME.lock   beside the folder that all links lead to: holds while there is no folder, or it is moved away
    NAME/.lock   inside it: holds for whoever reaches the same folder by another way (a bind mount, another name)

Both name their holder in the first line. The kernel drops a lock (flock) when its process ends, however it ends. Where
a file system has no locks, the file itself is the lock: one process alone makes it (O_EXCL) and removes it. Where locks
hold on one machine alone, another's is not seen. So the holder touches its files every BEAT_S, and a file that names a
process of another machine is taken over only when nobody has touched it for 3 * BEAT_S where this process has the
kernel's lock, else for QUIET_S. Somebody may still delete the files by hand, or stop a process for so long; so who
holds a folder asks before it writes whether it still does (`is_lost`).

flock needs no right but to open a file. So a lock's file is its user's alone (0600; his group's, too, where that may
write the folder).
"""

import datetime
import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import sys
import threading
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from hacpo_mega.cluster.machine.environment import process_start
from hacpo_mega.config.checks.run_dirs import LOCK
from hacpo_mega.models.files.visible import say

# Errors of a file system that has no locks (some network mounts).
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
BEAT_S = 10.0
QUIET_S = 90.0  # a network file system may show others a sign as late as 60 s
OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW  # never through a link that somebody has planted
MOST_TRIES = 5
LEAVE_S = 5.0  # for a process that ends at once to give its locks up


class Held(Exception):
    """Another job has the lock; its text says who."""


class RunLock(AbstractContextManager["RunLock"]):
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
        self._ends = threading.Event()
        threading.Thread(target=self._beat, name="run lock", daemon=True).start()
        self._take(self.path)
        if self.folder.is_dir():
            self.enter()

    def enter(self, aside: Path | None = None) -> None:
        """Takes the lock inside the folder, which exists now; `aside` is where the one before it has been moved to."""
        inside = self.folder / LOCK
        if aside is not None and (old := self._files.pop(inside, None)):
            old.release(aside / LOCK)
        if inside not in self._files:
            self._take(inside)
        self._identity = _identity(self.folder)

    def is_lost(self) -> bool:
        """True if the folder is there and no longer this holder's: its lock was deleted, or another job has taken it.

        A folder that is away, or another one in its place, is no loss: it may come back.
        """
        is_there = self._identity is not None and _identity(self.folder) == self._identity
        return is_there and not_the_folder(self.folder, self.token) is not None

    def leave(self) -> None:
        """Gives the locks up for a process that ends at once, whose other threads may write until it has ended.

        Its files say so from now on; the kernel's locks stay. A file system that does not answer is not waited for.
        """
        self._ends.set()
        thread = threading.Thread(target=self._give_up, name="run lock's end", daemon=True)
        thread.start()
        thread.join(LEAVE_S)

    def _take(self, path: Path) -> None:
        try:
            for _ in range(MOST_TRIES):
                # The file was released, made or taken over between the two calls that look at it: try again.
                with suppress(FileNotFoundError, FileExistsError):
                    self._files[path] = _LockFile(path, self.token)
                    return
            raise Held("a job that begins at this moment")
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
                with suppress(OSError):  # read-only or away for a while, which whoever writes there says
                    os.utime(file.descriptor)

    def _give_up(self) -> None:
        for path, file in list(self._files.items()):
            file.leave(path)

    def _release(self) -> None:
        self._ends.set()
        for path, file in self._files.items():
            file.release(path)
        self._files.clear()

    def __exit__(self, *_: object) -> None:
        self._release()


def not_the_folder(folder: Path, token: str) -> str | None:
    """The reason why a folder is not, or not now, the one that the holder of `token` has opened; None if it is."""
    try:
        if token in (folder / LOCK).read_text(encoding="utf-8", errors="replace"):
            return None
        reason = "another one is there"
    except OSError as error:
        reason = str(error.strerror)
    return f"{folder} is not the folder that this run opened ({reason}): it was moved, removed or unmounted"


class _LockFile:
    """One file that names its holder, this process: opened, and locked where it can be."""

    def __init__(self, path: Path, token: str) -> None:
        """Held when it is another's, FileNotFoundError or FileExistsError when it is to be looked at again.

        OSError where it cannot be made or opened.
        """
        self._path, self._token = path, token
        is_new = not os.path.lexists(path)
        self.descriptor = os.open(path, OPEN_FLAGS | (os.O_CREAT | os.O_EXCL if is_new else 0), 0o600)
        try:
            if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is no file", str(path))
            if is_new:
                with suppress(OSError):  # a file system without such rights
                    os.fchmod(self.descriptor, _rights(path, self.descriptor))
            self._is_locked = self._lock()
            if not is_new:
                self._require_no_holder()
            self._sign(is_new)
        except BaseException as error:
            if is_new and isinstance(error, OSError) and _identity(path) == _identity(self.descriptor):
                path.unlink()
            os.close(self.descriptor)
            raise

    def leave(self, path: Path) -> None:
        """Says that nobody holds it any more, and keeps the kernel's lock; `path` is where the file lies by now."""
        with suppress(OSError):  # gone with its disk: then nothing is held there
            if self._is_locked:
                os.ftruncate(self.descriptor, 0)
            elif _identity(path) == _identity(self.descriptor):
                path.unlink()

    def release(self, path: Path) -> None:
        """Gives the lock up: the file goes, and then the kernel's lock. A process that has opened it looks again."""
        self.leave(path)
        with suppress(OSError):
            if _identity(path) == _identity(self.descriptor):
                path.unlink()
        os.close(self.descriptor)

    def _lock(self) -> bool:
        """Locks the file; False where its file system has no locks. Held where another process has it."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._held() from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return False
        return True

    def _held(self) -> Held:
        return Held(self._content().partition("\n")[0] or "another job")

    def _require_no_holder(self) -> None:
        """Held where the process that the file names lives: on this machine, or on another one, by its heartbeat.

        Waits as long as it takes to know. FileNotFoundError when the file goes meanwhile.
        """
        owner = _process_in(self._content())
        if owner is not None and owner["space"] == _process_scope():
            if not self._is_locked and process_start(owner["pid"]) == owner["start"]:
                raise self._held()
            return
        if owner is None and self._is_locked:
            return
        touched_s = os.fstat(self.descriptor).st_mtime
        os.utime(self.descriptor)  # whoever begins beside this process sees that; now, by the file system's clock
        left_s = (3 * BEAT_S if self._is_locked else QUIET_S) - (os.fstat(self.descriptor).st_mtime - touched_s)
        if left_s <= 0.0:
            return
        say(f"{self._path} may be another machine's: waiting for a sign of it, {left_s:.0f} s at most", file=sys.stderr)
        before, end = _state(self._path), time.monotonic() + left_s
        while time.monotonic() < end:
            time.sleep(min(1.0, left_s / 10))
            if _state(self._path) != before:
                raise self._held()

    def _sign(self, is_new: bool) -> None:
        """Writes this process's name into the file, which nobody holds, or makes room for a new one."""
        if _identity(self._path) != _identity(self.descriptor):
            raise FileNotFoundError
        if not (is_new or self._is_locked):
            self._remove()
            raise FileExistsError
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, signature(self._token).encode(), 0)

    def _remove(self) -> None:
        """Takes a file without the kernel's lock out of the way. Held by whoever was faster."""
        aside = self._path.with_name(f"{self._path.name}.{self._token}")
        self._path.rename(aside)
        is_same = _identity(aside) == _identity(self.descriptor)
        if not is_same:  # it has been taken over meanwhile: that one's goes back
            with suppress(FileExistsError):
                os.link(aside, self._path)
        aside.unlink()
        if not is_same:
            raise Held("a job that begins at this moment")

    def _content(self) -> str:
        return os.pread(self.descriptor, 4096, 0).decode(errors="replace")


def _rights(path: Path, descriptor: int) -> int:
    """Permissions of a lock: its user, and his group if that may write the folder, and so take the lock away."""
    folder, file = os.stat(path.parent), os.fstat(descriptor)
    may_write = folder.st_mode & (stat.S_IWGRP | stat.S_ISVTX) == stat.S_IWGRP and folder.st_gid == file.st_gid
    return 0o660 if may_write else 0o600


def _state(path: Path) -> tuple[int, int, int]:
    """Inode, time and size of a lock file; its holder's heartbeat changes the time."""
    with path.open("rb") as file:  # opened: a network file system then asks its server
        info = os.fstat(file.fileno())
    return info.st_ino, info.st_mtime_ns, info.st_size


def is_gone(content: str) -> bool:
    """True if a `signature` is known to be of a process that has ended; one of another machine may live."""
    owner = _process_in(content)
    return owner is not None and owner["space"] == _process_scope() and process_start(owner["pid"]) != owner["start"]


def signature(token: str) -> str:
    """Content of a lock: a line for people, and one by which its process is known."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    process = os.getpid()
    known = {"token": token, "space": _process_scope(), "pid": process, "start": process_start(process)}
    return f"process {process} on {socket.gethostname()} since {now}\n{json.dumps(known)}\n"


def _process_in(content: str) -> dict[str, Any] | None:
    """The process in the second line of a signature; None if nobody holds it, or the holder has not yet written it."""
    with suppress(ValueError, IndexError, KeyError, TypeError):  # then it is not one of ours
        holder = json.loads(content.split("\n")[1])
        return {key: holder[key] for key in ("space", "pid", "start")}
    return None


def _process_scope() -> str:
    """The scope in which a number and a start identify a process: this boot of the machine, and this container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _identity(path: Path | int) -> tuple[int, int] | None:
    """Device and inode of a file or a folder; None when there is none."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino
