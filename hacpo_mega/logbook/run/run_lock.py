"""One writer per folder, whatever it is called: a lock beside it and one inside it. Imports no torch.

    .NAME.lock   beside the folder that all links lead to: holds while there is no folder, or it is moved away
    NAME/.lock   inside it: holds for whoever reaches the same folder by another way (a bind mount, another name)

Both say who holds them, and of which attempt of a job it is. The kernel drops a lock (flock) when its process ends,
however it ends. Where a file system has no locks, the file itself is the lock: made by one process alone (O_EXCL) and
removed by it. A file that a killed process has left is taken over as soon as that process is seen to be gone on this
machine, or, if it was another's, when it has given no sign for QUIET_S seconds, or for 3 * BEAT_S if it was an earlier
attempt of the same job: a holder touches its files every BEAT_S. An earlier attempt is never taken to be over without
that silence: a node that only the scheduler has lost may run on. Somebody may still delete the files by hand, or have
stopped a process for so long; so who holds a folder asks before it writes whether it still does (`is_lost`).

flock needs no right but to open a file. So a lock's file is its user's alone (0600; his group's, too, where that may
write the folder), and what the lock of a file is worth that others can open, only its signature tells.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from hacpo_mega.cluster.machine.environment import attempt_of_job
from hacpo_mega.config.checks.run_dirs import LOCK
from hacpo_mega.models.files.visible import say

# What a file system answers that has no locks (some network mounts).
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
BEAT_S = 10.0
QUIET_S = 90.0  # a network file system may show others a sign as late as 60 s
OPENING = os.O_RDWR | os.O_NOFOLLOW  # never what a planted link leads to
MOST_TRIES = 5
LEAVE_S = 5.0  # for the last words of a process that ends at once


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
        exists = self.folder.is_dir()
        self._take([self.path, self.folder / LOCK] if exists else [self.path])
        if exists:
            self.enter()
        self._ends = threading.Event()
        threading.Thread(target=self._beat, name="run lock", daemon=True).start()

    def enter(self, aside: Path | None = None) -> None:
        """Takes the lock inside the folder, which exists now; `aside` is where the one before it has been moved to."""
        inside = self.folder / LOCK
        if aside is not None and (old := self._files.pop(inside, None)):
            old.release(aside / LOCK)
        if inside not in self._files:
            self._take([inside])
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
        words = threading.Thread(target=self._give_up, name="run lock's end", daemon=True)
        words.start()
        words.join(LEAVE_S)

    def _take(self, paths: Sequence[Path]) -> None:
        try:
            self._hold(paths)
        except Held as holder:
            self._release()
            raise ValueError(
                f"{self._key} {self._given} is being written by {holder}: wait for it, end it, or give another "
                f"{self._key}"
            ) from holder
        except OSError as error:
            self._release()
            raise self._cannot(error) from error

    def _hold(self, paths: Sequence[Path]) -> None:
        """Takes the files in their order; last holders of other machines are given their time all at once."""
        for _ in range(MOST_TRIES):
            found: list[_LockFile] = []
            try:
                for path in paths:
                    # Not there any more, or there now: released, made or taken over between two looks at it.
                    with suppress(FileNotFoundError, FileExistsError):
                        if path not in self._files:
                            found.append(_LockFile(path, self.token))
                with suppress(FileNotFoundError):
                    _require_silence(found)
                    for file in found:
                        if file.settle():
                            self._files[file.path] = file
            finally:
                for file in found:
                    if file not in self._files.values():
                        file.drop()
            if all(path in self._files for path in paths):
                return
        raise Held("a job that begins at this moment")

    def _cannot(self, error: OSError) -> ValueError:
        return ValueError(
            f"{self._key} {self._given} cannot be locked ({error.strerror}: {error.filename or self.path}): make room "
            f"there, or give a folder that you may write"
        )

    def _beat(self) -> None:
        while not self._ends.wait(BEAT_S):
            for file in list(self._files.values()):
                file.touch()

    def _give_up(self) -> None:
        for path, file in list(self._files.items()):
            file.leave(path)

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
    """The reason why a folder is not, or not now, the one that the holder of `token` has opened; None if it is."""
    try:
        if token in (folder / LOCK).read_text(encoding="utf-8", errors="replace"):
            return None
        why = "another one is there"
    except OSError as error:
        why = str(error.strerror)
    return f"{folder} is not the folder that this run opened ({why}): it was moved, removed or unmounted"


class _LockFile:
    """One file that says who holds it: opened, locked where it can be, and this process's once it has settled.

    unsure_s   how long nobody may touch it until then, by what is known of its last holder
    """

    def __init__(self, path: Path, token: str) -> None:
        """Held while it is another's, FileNotFoundError or FileExistsError when it is to be looked at again.

        OSError where it cannot be made or opened.
        """
        self.path, self._token = path, token
        self._is_new = not os.path.lexists(path)
        self._descriptor = os.open(path, OPENING | (os.O_CREAT | os.O_EXCL if self._is_new else 0), 0o600)
        try:
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is no file", str(path))
            if self._is_new:
                with suppress(OSError):  # a file system without such rights
                    os.fchmod(self._descriptor, _rights(path, self._descriptor))
            self._is_locked = self._lock()
            self.unsure_s = 0.0 if self._is_new else self._silence_needed_s()
        except BaseException:
            os.close(self._descriptor)
            raise

    def holder(self) -> str:
        """Whom the file names."""
        return self._said().partition("\n")[0] or "another job"

    def settle(self) -> bool:
        """Makes the file this process's, whose last holder is gone; False: it is to be looked at again."""
        is_there = _identity(self.path) == _identity(self._descriptor)
        if self._is_new or (self._is_locked and is_there and not self._others_may_open()):
            try:
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, signature(self._token).encode(), 0)
            except OSError:
                self._is_new = True  # what it says now is nobody's
                raise
            return is_there
        if is_there:
            self._remove()
        return False

    def touch(self) -> None:
        """Gives a sign of life."""
        with suppress(OSError):  # read-only or away for a while, which whoever writes there says
            os.utime(self._descriptor)

    def leave(self, path: Path) -> None:
        """Says that nobody holds it any more, and keeps the kernel's lock; `path` is where the file lies by now."""
        with suppress(OSError):  # gone with its disk: then nothing is held there
            if self._is_locked:
                os.ftruncate(self._descriptor, 0)
            elif _identity(path) == _identity(self._descriptor):
                path.unlink()

    def release(self, path: Path) -> None:
        """Gives the lock up: the file goes, and then the kernel's lock. Whoever has opened it looks again."""
        self.leave(path)
        with suppress(OSError):
            if _identity(path) == _identity(self._descriptor):
                path.unlink()
        os.close(self._descriptor)

    def drop(self) -> None:
        """Lets go of a file that has not settled; one that was made here goes."""
        if self._is_new:
            self.release(self.path)
        else:
            os.close(self._descriptor)

    def _lock(self) -> bool:
        """Locks the file; False where its file system has no locks, or anybody may have locked it. Else Held."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if self._others_may_open():
                return False
            raise Held(self.holder()) from error
        except OSError as error:
            if error.errno in NO_LOCKS:
                return False
            raise
        return True

    def _silence_needed_s(self) -> float:
        """0 where the last holder is gone for sure; Held where it lives on this machine.

        A file that is locked here may be touched by another machine's process, whose locks hold there alone. Costs
        nothing where that one gave its lock up, or has been silent for long enough already.
        """
        said = _known(self._said())
        if said is not None and said["space"] == _space():
            if not self._is_locked and _start_of(said["pid"]) == said["start"]:
                raise Held(self.holder())
            return 0.0
        if said is None and self._is_locked:
            return 0.0
        enough_s = 3 * BEAT_S if said is not None and _is_earlier_attempt(said) else QUIET_S
        most_s = 3 * BEAT_S if self._is_locked else enough_s
        return max(0.0, min(most_s, enough_s - self._silent_s()))

    def _silent_s(self) -> float:
        """For how long nobody has touched the file, by the clock of its file system."""
        touched_s = os.fstat(self._descriptor).st_mtime
        if self._is_locked:
            os.utime(self._descriptor)  # whoever begins beside this process sees that
            return os.fstat(self._descriptor).st_mtime - touched_s
        clock = self.path.with_name(f"{self.path.name}.{self._token}")
        try:
            os.close(os.open(clock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return clock.stat().st_mtime - touched_s
        finally:
            clock.unlink(missing_ok=True)

    def _remove(self) -> None:
        """Takes a file out of the way whose holder is gone, so that a new one can be made. Held by whoever was faster.

        Also one that is locked here, but others can open.
        """
        aside = self.path.with_name(f"{self.path.name}.{self._token}")
        self.path.rename(aside)
        if _identity(aside) != _identity(self._descriptor):  # it has been taken over meanwhile: that one's goes back
            with suppress(FileExistsError):
                os.link(aside, self.path)
            aside.unlink()
            raise Held("a job that begins at this moment")
        aside.unlink()

    def _others_may_open(self) -> bool:
        mode = stat.S_IMODE(os.fstat(self._descriptor).st_mode)
        return bool(mode & 0o077 & ~_rights(self.path, self._descriptor))

    def _said(self) -> str:
        return os.pread(self._descriptor, 4096, 0).decode(errors="replace")


def _rights(path: Path, descriptor: int) -> int:
    """Permissions of a lock: its user, and his group if that may write the folder, and so take the lock away."""
    folder, file = os.stat(path.parent), os.fstat(descriptor)
    may_write = folder.st_mode & (stat.S_IWGRP | stat.S_ISVTX) == stat.S_IWGRP and folder.st_gid == file.st_gid
    return 0o660 if may_write else 0o600


def _is_earlier_attempt(said: Mapping[str, Any]) -> bool:
    """True if a signature is of an attempt of this process's own job that came before this one."""
    mine, number = attempt_of_job(), said.get("attempt")
    return mine is not None and isinstance(number, int) and said.get("job") == mine[0] and number < mine[1]


def _require_silence(files: Sequence[_LockFile]) -> None:
    """Held when somebody touches or writes one of the files within its seconds. FileNotFoundError when one goes."""
    unsure = [file for file in files if file.unsure_s > 0]
    if not unsure:
        return
    before, begin = {file: _sign(file.path) for file in unsure}, time.monotonic()
    most_s, names = max(file.unsure_s for file in unsure), " and ".join(str(file.path) for file in unsure)
    say(f"{names} may be another machine's: waiting for a sign of it, {most_s:.0f} s at most", file=sys.stderr)
    while left := [file for file in unsure if time.monotonic() - begin < file.unsure_s]:
        time.sleep(min(1.0, most_s / 10))
        for file in left:
            if _sign(file.path) != before[file]:
                raise Held(file.holder())


def _sign(path: Path) -> tuple[int, int, int]:
    with path.open("rb") as file:  # opened: a network file system then asks its server
        found = os.fstat(file.fileno())
    return found.st_ino, found.st_mtime_ns, found.st_size


def is_gone(said: str) -> bool:
    """True if a `signature` is known to be of a process that has ended; one of another machine may live."""
    found = _known(said)
    return found is not None and found["space"] == _space() and _start_of(found["pid"]) != found["start"]


def signature(token: str) -> str:
    """Content of a lock: a line for people, and one by which its process is known."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    process = os.getpid()
    known = {"token": token, "space": _space(), "pid": process, "start": _start_of(process)}
    if found := attempt_of_job():
        known |= {"job": found[0], "attempt": found[1]}
    return f"process {process} on {socket.gethostname()} since {now}\n{json.dumps(known)}\n"


def _known(said: str) -> dict[str, Any] | None:
    """The process in the second line of a signature; None if nobody holds it, or the holder has not yet written it."""
    with suppress(ValueError, IndexError, KeyError, TypeError):  # then it is not one of ours
        known = json.loads(said.split("\n")[1])
        return {key: known[key] for key in ("space", "pid", "start")} | {
            "job": known.get("job"),
            "attempt": known.get("attempt"),
        }
    return None


def _space() -> str:
    """Within what a process's number and start tell whether it lives: this boot of the machine, and this container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _start_of(process: int) -> str | None:
    """Start of a process, in ticks since the boot; None for one that is gone, or dead and not yet buried."""
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
