"""Folders that nobody else on the machine can enter: a job's, removed with it, and the user's, which stays.

A job's folder has the store file by which its processes meet, where a launcher of ours started them on one machine, and
the sockets of engines that span processes. No torch.
"""

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = "HACPO_MEGA_FOLDER"  # of the job, made by the launcher of this machine
SOCKETS = "VLLM_RPC_BASE_PATH"  # where vLLM puts its sockets
# A socket's path has at most 107 bytes in Linux, and vLLM's names have 36.
LONGEST = 107 - 37
PREFIX, OWNER = "hacpo_mega-", "launcher"  # of a job's folder, and the file that its launcher holds locked


@contextmanager
def job_folder() -> Iterator[Path]:
    """A new folder of mode 700 under TMPDIR; under /tmp where that is too long a path for sockets.

    Removes folders that killed launchers have left. A lock tells whether a launcher lives: it ends with its process,
    also in another container of the same machine, where the process has another number.
    """
    folder = _make_temporary()
    _remove_leftovers(folder.parent)
    owner = (folder / f".{OWNER}").open("x")
    try:
        with suppress(OSError):  # a file system without locks: leftovers stay there
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / f".{OWNER}").rename(folder / OWNER)  # locked before others see it by its name
        yield folder
    finally:
        owner.close()
        shutil.rmtree(folder, ignore_errors=True)  # a socket of a killed process may go at the same moment


def _remove_leftovers(parent: Path) -> None:
    """Removes the folders of this user's jobs without a living launcher. One without OWNER may be about to get it."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another's, in use, or gone meanwhile
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / OWNER).open("r+") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


class SocketFolder:
    """Folder of this process's engine sockets: the job's, the user's choice, or one of its own."""

    def __init__(self) -> None:
        self._own: Path | None = None
        if FOLDER in os.environ:
            os.environ.setdefault(SOCKETS, os.environ[FOLDER])
        elif SOCKETS not in os.environ:
            self._own = _make_temporary()
            os.environ[SOCKETS] = str(self._own)

    def remove(self) -> None:
        """Removes all that is this process's own."""
        if self._own is not None:
            os.environ.pop(SOCKETS, None)
            shutil.rmtree(self._own, ignore_errors=True)  # it may be gone already


def own_folder() -> Path:
    """A folder of the user's for files that outlive a job: in the home's cache, or under TMPDIR if that is impossible.

    Another user can take a name under TMPDIR, but none in a home. ValueError where both fail.
    """
    return _first_usable(_home_cache(), _in_tmpdir())


def folder_on_node() -> Path:
    """A folder of the user's on this node's disk, under TMPDIR; in the home where another user has that name."""
    home = _home_cache()
    return _first_usable(_in_tmpdir(), None if home is None else home / socket.gethostname())


def _in_tmpdir() -> Path:
    return Path(tempfile.gettempdir()) / f"hacpo_mega-{os.getuid()}"


def _home_cache() -> Path | None:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hacpo_mega"
    except RuntimeError:  # a user without a home
        return None


def _first_usable(*folders: Path | None) -> Path:
    """The first folder that exists or can be made, is this user's and writable, and that nobody else may write."""
    for folder in filter(None, folders):
        with suppress(OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            status = folder.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            # a container's home may be read only
            if is_own and not stat.S_IMODE(status.st_mode) & 0o022 and os.access(folder, os.W_OK):
                return folder
    named = " nor ".join(str(folder) for folder in folders if folder is not None)
    raise ValueError(f"neither {named} is a folder of yours, or can be made one: set TMPDIR to a folder of yours")


def _make_temporary() -> Path:
    for parent in (tempfile.gettempdir(), "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        if len(os.fsencode(folder)) <= LONGEST:
            return folder
        folder.rmdir()
    raise ValueError(f"{folder} is too long a path for sockets: set TMPDIR to a shorter one")
