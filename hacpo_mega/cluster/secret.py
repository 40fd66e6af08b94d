"""The secret of a job, and how two of its processes show each other that they know it before anything else is said.

    host -> caller     32 random bytes, as soon as the connection stands
    caller -> host     32 random bytes, and HMAC-SHA256 over both with the secret
    host -> caller     the same in the other role

All lengths are fixed, so nothing that a stranger sends is parsed; what it is proved for (`purpose`) and the role are
part of what is signed, so that no answer serves elsewhere, and the random bytes make every answer serve once.
What follows on the connection is neither signed nor encrypted: docs/security.md says what that leaves open.
Not here: which sockets there are (watchdog.py, preflight.py, rendezvous.py).
"""

import hmac
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from hacpo_mega.cluster.private_folder import own_folder
from hacpo_mega.cluster.seat import Seat

SECRET = "HACPO_MEGA_SECRET"  # 32 random bytes as hexadecimal digits; the launcher or the job script makes them
NUM_BYTES = 32  # of the secret, of a challenge and of a proof
EXPORT = f"export {SECRET}=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n')"
MAX_CALLERS = 256  # who have connected and not shown anything yet; then the one that has been silent longest goes


class Stranger(OSError):
    """Who is at the other end does not know the job's secret, or does not speak like one of its processes."""


class AnotherSecret(Stranger):
    """Who is at the other end speaks like a process of a job, and has another secret."""


@dataclass(frozen=True)
class Secret:
    """The bytes; never shown."""

    key: bytes = field(repr=False)

    @classmethod
    def of_job(cls, seat: Seat) -> Self:
        """What the launcher has given to all processes; on one machine also what a file of the user's says.

        ValueError where processes on several machines were given none, or something else.
        """
        if said := os.environ.get(SECRET):
            return cls(_decoded(said))
        if seat.num_local < seat.world_size:
            raise ValueError(
                f"{SECRET} is not set, and the processes of this job are on several machines: say `{EXPORT}` once, "
                "before srun (torchrun: the same value on every node)"
            )
        return cls(_of_this_machine() if seat.world_size > 1 else os.urandom(NUM_BYTES))

    def proof(self, role: str, purpose: str, challenges: bytes) -> bytes:
        """Shows that whoever knows these random bytes knows the secret, too."""
        text = "\n".join(("hacpo_mega", role, purpose, ""))
        return hmac.digest(self.key, text.encode() + challenges, "sha256")


def new_secret() -> str:
    """A value for the environment of a job's processes."""
    return os.urandom(NUM_BYTES).hex()


def forget_secret() -> None:
    """Keeps it from the processes that this one starts later: graders, for one."""
    os.environ.pop(SECRET, None)


def _decoded(said: str) -> bytes:
    with suppress(ValueError):
        if len(key := bytes.fromhex(said)) >= NUM_BYTES:
            return key
    raise ValueError(f"{SECRET} must be at least {2 * NUM_BYTES} hexadecimal digits (found {len(said)} characters)")


def _of_this_machine() -> bytes:
    """Of all jobs that this user starts by hand on this machine; made by whichever process comes first."""
    path = own_folder() / f"secret-{socket.gethostname()}"  # homes are shared by machines
    draft = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    with suppress(FileExistsError):
        if not path.exists():
            try:
                descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(descriptor, "w", encoding="ascii") as file:
                    file.write(new_secret())
                os.link(draft, path)  # whole or not at all; the first one stays
            finally:
                draft.unlink(missing_ok=True)
    return _decoded(path.read_text(encoding="ascii"))


class Gate:
    """A listening socket that lets in who knows the secret. Strangers are heard side by side and hold up nobody.

    turned_away   is told once per address that it has shown another secret
    """

    def __init__(
        self,
        server: socket.socket,
        secret: Secret,
        purpose: str,
        turned_away: Callable[[str], object] = lambda address: None,
    ) -> None:
        self._server, self._secret, self._purpose = server, secret, purpose
        self._turned_away, self._known = turned_away, set[str]()
        self._callers: dict[socket.socket, bytearray] = {}  # what was sent to each, and what each has said, in order
        server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def admit(self, timeout_s: float | None = None) -> socket.socket:
        """The next connection that has shown the secret. TimeoutError when none has in time."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while end is None or time.monotonic() < end:
            for key, _ in self._selector.select(None if end is None else max(0.0, end - time.monotonic())):
                if key.fileobj is self._server:
                    self._greet()
                elif admitted := self._hear(key.fileobj):
                    return admitted
        raise TimeoutError(f"nobody who knows the job's secret has come within {timeout_s:.0f} s")

    def expect(self, timeout_s: float) -> Future[socket.socket]:
        """The same beside what this thread does; the gate is closed when somebody has come, or the time is up."""
        admitted: Future[socket.socket] = Future()

        def admit() -> None:
            try:
                admitted.set_result(self.admit(timeout_s))
            except OSError as error:
                admitted.set_exception(error)
            finally:
                self.close()

        threading.Thread(target=admit, name="gate", daemon=True).start()
        return admitted

    def close(self) -> None:
        """Sends away who has not been let in, and closes the door."""
        for caller in list(self._callers):
            self._dismiss(caller)
        self._selector.close()
        self._server.close()

    def _greet(self) -> None:
        with suppress(OSError):  # it may have hung up again
            caller, _ = self._server.accept()
            caller.setblocking(False)
            self._callers[caller] = bytearray(os.urandom(NUM_BYTES))
            self._selector.register(caller, selectors.EVENT_READ)
            if len(self._callers) > MAX_CALLERS:
                self._dismiss(next(iter(self._callers)))
            _speak(caller, self._callers[caller])

    def _hear(self, caller: socket.socket) -> socket.socket | None:
        heard = self._callers.get(caller)
        if heard is None:  # dismissed a moment ago
            return None
        with suppress(OSError):
            more = caller.recv(3 * NUM_BYTES - len(heard))
            heard += more
            if more and len(heard) < 3 * NUM_BYTES:
                return None
            challenges, shown = bytes(heard[: 2 * NUM_BYTES]), bytes(heard[2 * NUM_BYTES :])
            if hmac.compare_digest(shown, self._secret.proof("caller", self._purpose, challenges)):
                _speak(caller, self._secret.proof("host", self._purpose, challenges))
                self._selector.unregister(caller)
                del self._callers[caller]
                caller.setblocking(True)
                return caller
            if len(heard) == 3 * NUM_BYTES and len(self._known) < MAX_CALLERS:
                address = caller.getpeername()[0]
                if address not in self._known:
                    self._known.add(address)
                    self._turned_away(address)
        self._dismiss(caller)
        return None

    def _dismiss(self, caller: socket.socket) -> None:
        del self._callers[caller]
        self._selector.unregister(caller)
        caller.close()


def introduce(connection: socket.socket, secret: Secret, purpose: str, timeout_s: float) -> None:
    """Shows the host of a connection the secret, and lets it show that it knows it. Stranger where it does not."""
    end = time.monotonic() + timeout_s
    challenges = _read(connection, NUM_BYTES, end) + os.urandom(NUM_BYTES)
    connection.sendall(challenges[NUM_BYTES:] + secret.proof("caller", purpose, challenges))
    shown = _read(connection, NUM_BYTES, end, AnotherSecret)
    if not hmac.compare_digest(shown, secret.proof("host", purpose, challenges)):
        raise Stranger("who listens there does not know this job's secret")
    connection.settimeout(None)


def _speak(connection: socket.socket, text: bytes) -> None:
    """A few bytes on a fresh connection, whose buffer is empty."""
    if connection.send(text) < len(text):
        raise Stranger("it does not take 32 bytes")


def _read(connection: socket.socket, num_bytes: int, end: float, hung_up: type[Stranger] = Stranger) -> bytes:
    """Exactly so many bytes before the time `end`. Stranger where they do not come, `hung_up` where nothing can."""
    heard = b""
    while len(heard) < num_bytes:
        connection.settimeout(max(1e-3, end - time.monotonic()))
        try:
            more = connection.recv(num_bytes - len(heard))
        except TimeoutError:
            raise Stranger("who listens there says nothing that a process of this job would") from None
        if not more:
            raise hung_up("who listens there hangs up: it has another secret, or is no process of this job")
        heard += more
    return heard
