"""The secret of a job, and the handshake by which two of its processes prove that they know it.

    host -> caller     32 random bytes, as soon as they are connected
    caller -> host     32 random bytes, and HMAC-SHA256 over both with the secret
    host -> caller     HMAC-SHA256 over both, signed as host

All lengths are fixed, so nothing that an unauthenticated peer sends is parsed. The `purpose` and the role are part of
what is signed, so no answer serves elsewhere, and the random bytes make every answer serve once. The connection itself
is neither signed nor encrypted: docs/security.md says what that leaves open. Elsewhere: which sockets there are
(watchdog.py, preflight.py, rendezvous.py).
"""

import atexit
import hmac
import os
import selectors
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from hacpo_mega.cluster.launcher_env import RANK_VARIABLES, LauncherEnv, from_launcher, num_local
from hacpo_mega.cluster.security.private_folder import FOLDER, own_folder
from hacpo_mega.models.files.visible import say

SECRET = "HACPO_MEGA_SECRET"  # 32 random bytes as hexadecimal digits; the launcher or the job script makes them
NUM_BYTES = 32  # of the secret, of a challenge and of a proof
EXPORT = f"export {SECRET}=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n')"
SECRET_FILE = "HACPO_MEGA_SECRET_FILE"  # of the process that made it
# Seconds: the longest wait for rank 0's file, the wait before the first notice, and the time between two checks.
SHARED_S, NOTICE_S, POLL_S = 300.0, 15.0, 0.5
MAX_CALLERS = 256  # connected and not yet authenticated; one more disconnects the oldest of them


class AuthError(OSError):
    """Raised if the other end does not know the job's secret, or does not speak like one of its processes."""


class WrongSecret(AuthError):
    """Raised if the other end speaks like a process of a job, and has another secret."""


@dataclass(frozen=True)
class Secret:
    """A job's secret; its bytes are never printed."""

    key: bytes = field(repr=False)

    @classmethod
    def of_job(cls, env: LauncherEnv) -> Self:
        """The secret that the launcher has given to all processes, else on one machine that of a file of the user's.

        ValueError where processes on several machines were given none, or something else.
        """
        if value := os.environ.get(SECRET):
            return cls(_decode(value))
        if env.num_local < env.world_size:
            raise ValueError(
                f"{SECRET} is not set, and the processes of this job are on several machines: say `{EXPORT}` once, "
                "before srun (torchrun: the same value on every node)"
            )
        return cls(_machine_secret() if env.world_size > 1 else os.urandom(NUM_BYTES))

    def proof(self, role: str, purpose: str, challenges: bytes) -> bytes:
        """The signature of the two challenges by one who knows the secret."""
        text = "\n".join(("hacpo_mega", role, purpose, ""))
        return hmac.digest(self.key, text.encode() + challenges, "sha256")


def new_secret() -> str:
    """A secret as text, for the environment of a job's processes."""
    return os.urandom(NUM_BYTES).hex()


def forget_secret() -> None:
    """Hides the secret from processes that this one starts later, such as graders. All ranks know it by now."""
    os.environ.pop(SECRET, None)
    if path := os.environ.pop(SECRET_FILE, None):
        with suppress(OSError):  # it may have gone with its folder
            os.unlink(path)


def share_secret(run_dir: Path, patience_s: float) -> None:
    """Gives the processes of a Slurm step on several nodes one secret, if none is exported. Runs before `of_job`.

    By a file beside `run_dir`, which all nodes see: rank 0 makes it, for this step alone and readable by its user
    alone, and removes it by `forget_secret`. ValueError where it cannot be made, or does not appear.
    """
    rank, world_size = (from_launcher(*names) for names in RANK_VARIABLES[:2])
    if SECRET in os.environ or "SLURM_STEP_ID" not in os.environ or num_local(world_size) == world_size:
        return
    step = [os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    folder = Path(os.path.realpath(run_dir))
    path = folder.with_name(f".{folder.name}.{'.'.join(step)}.secret")
    advice = f"say `{EXPORT}` once, before srun"
    if rank == 0:
        secret = new_secret()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _private_draft(path, secret) as draft:
                draft.replace(path)  # over a leftover of a killed process
        except OSError as error:
            raise ValueError(f"{path}, by which the nodes of this job agree: {error.strerror}; {advice}") from error
        os.environ[SECRET_FILE] = str(path)
        atexit.register(forget_secret)  # where this process ends before the others have come
    else:
        secret = _await_private(path, min(patience_s, SHARED_S), advice)
    os.environ[SECRET] = secret


@contextmanager
def _private_draft(path: Path, text: str) -> Iterator[Path]:
    """A file with a text beside `path`, of this user alone, until the block ends, which may give it that name."""
    draft = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(text)
        yield draft
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def key_in_file(name: str) -> Iterator[tuple[str, Path]]:
    """A new key, and a file of this user alone that holds it until the block ends, in the job's folder if any."""
    folder = Path(os.environ[FOLDER]) if FOLDER in os.environ else own_folder()
    with _private_draft(folder / name, key := new_secret()) as file:
        yield key, file


def _await_private(path: Path, patience_s: float, advice: str) -> str:
    """The text of a file that this user has made and nobody else may read. ValueError if none appears in time."""
    begin, has_notified = time.monotonic(), False
    while True:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, encoding="ascii", errors="replace") as file:
                status = os.fstat(descriptor)
                is_mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if is_mine and not stat.S_IMODE(status.st_mode) & 0o077:
                    return file.read()
        waited_s = time.monotonic() - begin
        if waited_s > patience_s:
            raise ValueError(
                f"{SECRET} is not set, and rank 0 has made no {path} of this user's for {patience_s:.0f} s: {advice}, "
                "or give a run_dir that all nodes see"
            )
        if not has_notified and waited_s > NOTICE_S:
            say(f"waiting for rank 0, which makes {path}", file=sys.stderr)
            has_notified = True
        time.sleep(POLL_S)


def _decode(value: str) -> bytes:
    with suppress(ValueError):
        if len(key := bytes.fromhex(value)) >= NUM_BYTES:
            return key
    raise ValueError(f"{SECRET} must be at least {2 * NUM_BYTES} hexadecimal digits (found {len(value)} characters)")


def _machine_secret() -> bytes:
    """The secret of all jobs that this user starts by hand on this machine; the first process makes it."""
    path = own_folder() / f"secret-{socket.gethostname()}"  # homes are shared by machines
    if not path.exists():
        with suppress(FileExistsError), _private_draft(path, new_secret()) as draft:
            os.link(draft, path)  # whole or not at all; the first one stays
    return _decode(path.read_text(encoding="ascii"))


class AuthListener:
    """A listening socket that accepts peers that know the secret. They authenticate concurrently: none delays another.

    on_wrong_secret   called with the address of a peer that has another secret, once per address
    """

    def __init__(
        self,
        server: socket.socket,
        secret: Secret,
        purpose: str,
        on_wrong_secret: Callable[[str], object] = lambda address: None,
    ) -> None:
        self._server, self._secret, self._purpose = server, secret, purpose
        self._on_wrong_secret, self._reported = on_wrong_secret, set[str]()
        self._callers: dict[socket.socket, bytearray] = {}  # bytes sent to each and received from each, in order
        server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def admit(self, timeout_s: float | None = None) -> socket.socket:
        """The next connection that has shown the secret. TimeoutError when none has in time."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while end is None or time.monotonic() < end:
            for key, _ in self._selector.select(None if end is None else max(0.0, end - time.monotonic())):
                if key.fileobj is self._server:
                    self._accept()
                elif admitted := self._receive(key.fileobj):
                    return admitted
        raise TimeoutError(f"no process with the job's secret has connected within {timeout_s:.0f} s")

    def expect(self, timeout_s: float) -> Future[socket.socket]:
        """Admits one connection in a thread, which then closes the listening socket, as when the time is up."""
        admitted: Future[socket.socket] = Future()

        def admit() -> None:
            try:
                admitted.set_result(self.admit(timeout_s))
            except OSError as error:
                admitted.set_exception(error)
            finally:
                self.close()

        threading.Thread(target=admit, name="auth", daemon=True).start()
        return admitted

    def close(self) -> None:
        """Disconnects peers that are not authenticated, and closes the socket."""
        for caller in list(self._callers):
            self._disconnect(caller)
        self._selector.close()
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the caller may have disconnected already
            caller, _ = self._server.accept()
            caller.setblocking(False)
            self._callers[caller] = bytearray(os.urandom(NUM_BYTES))
            self._selector.register(caller, selectors.EVENT_READ)
            if len(self._callers) > MAX_CALLERS:
                self._disconnect(next(iter(self._callers)))
            _send(caller, self._callers[caller])

    def _receive(self, caller: socket.socket) -> socket.socket | None:
        """The caller, if what it has sent so far proves the secret; None where more must come, or it was refused."""
        received = self._callers.get(caller)
        if received is None:  # disconnected a moment ago
            return None
        with suppress(OSError):
            more = caller.recv(3 * NUM_BYTES - len(received))
            received += more
            if more and len(received) < 3 * NUM_BYTES:
                return None
            challenges, proof = bytes(received[: 2 * NUM_BYTES]), bytes(received[2 * NUM_BYTES :])
            if hmac.compare_digest(proof, self._secret.proof("caller", self._purpose, challenges)):
                _send(caller, self._secret.proof("host", self._purpose, challenges))
                self._selector.unregister(caller)
                del self._callers[caller]
                caller.setblocking(True)
                return caller
            if len(received) == 3 * NUM_BYTES and len(self._reported) < MAX_CALLERS:
                address = caller.getpeername()[0]
                if address not in self._reported:
                    self._reported.add(address)
                    self._on_wrong_secret(address)
        self._disconnect(caller)
        return None

    def _disconnect(self, caller: socket.socket) -> None:
        del self._callers[caller]
        self._selector.unregister(caller)
        caller.close()


def authenticate(connection: socket.socket, secret: Secret, purpose: str, timeout_s: float) -> None:
    """Proves knowledge of the secret to the host of a connection and checks the host's proof; else AuthError."""
    end = time.monotonic() + timeout_s
    challenges = _read(connection, NUM_BYTES, end) + os.urandom(NUM_BYTES)
    connection.sendall(challenges[NUM_BYTES:] + secret.proof("caller", purpose, challenges))
    proof = _read(connection, NUM_BYTES, end, WrongSecret)
    if not hmac.compare_digest(proof, secret.proof("host", purpose, challenges)):
        raise AuthError("the listener there does not know this job's secret")
    connection.settimeout(None)


def _send(connection: socket.socket, text: bytes) -> None:
    """Sends a few bytes on a fresh connection, whose buffer is empty."""
    if connection.send(text) < len(text):
        raise AuthError("it does not take 32 bytes")


def _read(connection: socket.socket, num_bytes: int, end: float, closed_error: type[AuthError] = AuthError) -> bytes:
    """Reads exactly `num_bytes` before the time `end`. AuthError if they do not come, `closed_error` at end-of-file."""
    received = b""
    while len(received) < num_bytes:
        connection.settimeout(max(1e-3, end - time.monotonic()))
        try:
            more = connection.recv(num_bytes - len(received))
        except TimeoutError:
            raise AuthError("the listener there does not answer like a process of this job") from None
        if not more:
            raise closed_error("the listener there hangs up: it has another secret, or is no process of this job")
        received += more
    return received
