"""The store through which the processes of a job meet, and the access to it.

    a launcher of ours on one machine    a file in the job's private folder: nothing listens
    torchrun                             the launcher's own
    srun                                 a server of rank 0 on the job's interface; rank 0 tells its port at MASTER_PORT
                                         to processes with the job's secret

torch's client has no time limit against a listener that never answers. So torch's protocol begins only after the other
side has shown the secret. Elsewhere: the secret itself (secret.py), the groups that are made through the store
(place.py).
"""

import os
import resource
import socket
import struct
import sys
import threading
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist

from hacpo_mega.cluster.launcher_env import LauncherEnv, Unreachable, is_on_one_machine
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.cluster.security.secret import AuthListener, Secret, WrongSecret, authenticate
from hacpo_mega.models.files.visible import say

PROBE_S = 5.0  # for one connection
POLL_S = 0.2
PURPOSE = "store"
NAME_BYTES = 8  # of the random name of an attempt
# How long rank 0 is asked again after it refused the secret: it may be an earlier attempt's, which is about to end.
REFUSED_S = 60.0
HINT = "give every process of the job the same HACPO_MEGA_SECRET"
FIRST_NOTICE_S = 60.0
MOST_NAMED = 3
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
SPARE_FILES = 1024  # beside the connections of the store: groups, engine, data, logs


def open_store(env: LauncherEnv, secret: Secret, patience_s: float) -> dist.Store:
    """The job's store; Unreachable if there is none within `patience_s`, which also bounds every request to it."""
    if env.store_file is not None:
        store = dist.FileStore(str(env.store_file), -1)  # -1: the maker of the folder removes it
        store.set_timeout(timedelta(seconds=patience_s))
        return store
    if env.launcher_keeps_store:
        store = _connect(env.address, env.port, env.world_size, patience_s)
        return dist.PrefixStore(_attempt_name(env, store, patience_s), store)
    if env.rank == 0:
        return _serve_store(env, secret, patience_s)
    address = "127.0.0.1" if is_on_one_machine() else env.address
    return _connect(address, _ask_store_port(env, address, secret, patience_s), env.world_size, patience_s)


def _attempt_name(env: LauncherEnv, store: dist.Store, patience_s: float) -> str:
    """Name of this attempt, made by rank 0: torchrun's store still has the keys of earlier attempts.

    TORCHELASTIC_RESTART_COUNT would not do: a node that starts again because another one failed has not counted that.
    """
    name = os.urandom(NAME_BYTES).hex()
    if env.rank == 0:
        threading.Thread(target=_answer_name_requests, args=(store.clone(), name, env.world_size), daemon=True).start()
        return name
    store.append("asking", name)
    try:
        store.wait([name], timedelta(seconds=patience_s))
        return store.get(name).decode()
    except RuntimeError as error:
        raise Unreachable(f"rank {env.rank} on {env.node}: rank 0 has not come within {patience_s:g} s") from error


def _answer_name_requests(store: dist.Store, name: str, num_ranks: int) -> None:
    """Answers requests for the name until all ranks are here; a later one is of a restarted rank: the next attempt."""
    num_answered, size = 0, 2 * NAME_BYTES
    arrivals = [f"{name}/hacpo_mega/{_arrival_key(rank)}" for rank in range(num_ranks)]
    with suppress(RuntimeError):  # the launcher has ended, and its store
        while not store.check(arrivals):
            asking = store.get("asking").decode() if store.check(["asking"]) else ""
            for start in range(num_answered * size, len(asking), size):
                store.set(asking[start : start + size], name)
            num_answered = len(asking) // size
            time.sleep(POLL_S)


def _serve_store(env: LauncherEnv, secret: Secret, patience_s: float) -> dist.Store:
    address = listening_address()
    try:
        contact = listen(address, env.port, backlog=env.world_size)
    except OSError as error:
        raise Unreachable(
            f"rank 0 cannot listen on {address or 'this machine'} port {env.port} (MASTER_PORT): {error.strerror}. "
            "Another program has it: set MASTER_PORT to a free port of the job's first node"
        ) from error
    server = listen(address, 0, backlog=env.world_size)
    port = server.getsockname()[1]
    store = dist.TCPStore(
        own_address(),
        port,
        world_size=env.world_size,
        is_master=True,
        timeout=timedelta(seconds=patience_s),
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )
    me = f"rank 0 on {env.node}"
    listener = AuthListener(contact, secret, PURPOSE, lambda caller: report_wrong_secret(me, caller))
    threading.Thread(target=_send_store_port, args=(listener, port), name="store", daemon=True).start()
    return store


def _send_store_port(listener: AuthListener, port: int) -> None:
    """Sends the store's port to every authenticated caller, until this process ends: preflight asks again."""
    while True:
        caller = listener.admit()
        with caller, suppress(OSError):  # the caller may have gone meanwhile
            caller.sendall(struct.pack(">H", port))


def report_wrong_secret(me: str, caller: str) -> None:
    """Reports at once a process that was refused; otherwise those that wait for it would only name its rank, much
    later."""
    with suppress(OSError):  # nobody can read it
        say(f"{me}: a process at {caller} has another secret than this job and is turned away; {HINT}", file=sys.stderr)


def _ask_store_port(env: LauncherEnv, address: str, secret: Secret, patience_s: float) -> int:
    began, port, was_turned_away = time.monotonic(), env.port, False
    end, refused_until = began + patience_s, began + min(REFUSED_S, patience_s)
    while True:
        left_s = max(POLL_S, end - time.monotonic())
        try:
            with socket.create_connection((address, port), timeout=min(PROBE_S, left_s)) as connection:
                authenticate(connection, secret, PURPOSE, left_s)
                connection.settimeout(left_s)
                (store_port,) = struct.unpack(">H", connection.recv(2, socket.MSG_WAITALL))
                return store_port
        except (OSError, struct.error) as error:
            problem = error
        is_turned_away = isinstance(problem, WrongSecret)
        was_turned_away |= is_turned_away  # says more than the refused connection after rank 0 has ended
        now, me = time.monotonic(), f"rank {env.rank} on {env.node}"
        if (is_turned_away and now > refused_until) or (was_turned_away and now > end):
            raise Unreachable(f"{me}: rank 0 at {address} port {port} has another secret, or is another job's; {HINT}")
        if now > end:
            raise Unreachable(
                f"{me}: no store of this job at {address} port {port} for {patience_s:.0f} s: {problem}. Is rank 0 "
                "there, and MASTER_PORT a port that no other program has?"
            )
        time.sleep(POLL_S)


def _connect(address: str, port: int, world_size: int, patience_s: float) -> dist.Store:
    try:
        return dist.TCPStore(
            address,
            port,
            world_size=world_size,
            is_master=False,
            timeout=timedelta(seconds=patience_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise Unreachable(str(error).strip().split("\n")[0]) from error


class RollCall:
    """Arrival of a job's ranks: each sets a key; rank 0 waits for all, and any rank checks them if a start fails."""

    def __init__(self, store: dist.Store, rank_map: RankMap, rank: int, patience_s: float) -> None:
        """Records the arrival of this rank."""
        self._store, self._rank_map, self._rank, self._patience_s = store, rank_map, rank, patience_s
        store.set(_arrival_key(rank), "1")

    def wait(self) -> None:
        """On rank 0, waits for all ranks and names the missing ones after a minute, two, four ...; Unreachable when the
        time is up."""
        keys = [_arrival_key(rank) for rank in range(self._rank_map.world_size)]
        began, notice_s = time.monotonic(), FIRST_NOTICE_S
        while self._rank == 0 and len(keys) > 1:
            left_s = self._patience_s - (time.monotonic() - began)
            try:
                self._store.wait(keys, timedelta(seconds=max(POLL_S, min(notice_s, left_s))))
                return
            except RuntimeError:
                if left_s <= notice_s:
                    self.require_all()
                if absent := self._absent():
                    say(f"{absent} not come yet; waiting", file=sys.stderr)
            notice_s *= 2

    def require_all(self) -> None:
        """Unreachable if other ranks are missing: with a line on one rank of the job, without text on the rest."""
        if absent := self._absent():
            if self._store.add("absent", 1) > 1:
                raise Unreachable("")
            raise Unreachable(
                f"{absent} not come within {self._patience_s:g} s: start all {self._rank_map.world_size} ranks, and "
                "see the log of those that began"
            )

    def _absent(self) -> str:
        """The missing ranks, as the beginning of a sentence; empty if all have arrived."""
        try:
            absent = [rank for rank in range(self._rank_map.world_size) if not self._store.check([_arrival_key(rank)])]
        except RuntimeError as error:
            first = self._rank_map.coordinate(0)
            raise Unreachable(
                f"{first}, or the launcher, keeps the store of the job and has ended: see its log"
            ) from error
        named = "; ".join(str(self._rank_map.coordinate(rank)) for rank in absent[:MOST_NAMED])
        more = f" and {len(absent) - MOST_NAMED} more ranks" if len(absent) > MOST_NAMED else ""
        return f"{named}{more} {'has' if len(absent) == 1 else 'have'}" if absent else ""


def _arrival_key(rank: int) -> str:
    return f"here/{rank}"


def listen(address: str, port: int, backlog: int = 128) -> socket.socket:
    """A server on one address of this machine; "" is all of them."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=backlog)


def own_address() -> str:
    """The address of this host on the way to the job's first node (a host may have many; nothing is sent)."""
    if is_on_one_machine():
        return "127.0.0.1"
    target = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, kind, *_, address = socket.getaddrinfo(*target, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def listening_address() -> str:
    """The address at which processes of this job reach this one; "" (all) if its host name leads to itself only."""
    address, name = own_address(), os.environ["MASTER_ADDR"]
    if is_on_one_machine() or not ip_address(address).is_loopback:
        return address
    with suppress(ValueError):
        return str(ip_address(name))
    return ""


def published_address(port: int) -> str:
    """Address of a port of this process for the others of the job: "address hostname port"."""
    return f"{own_address()} {socket.gethostname()} {port}"


def connect_published(published: str, secret: Secret, purpose: str, timeout_s: float) -> socket.socket:
    """A connection, after the handshake, to a port by its `published_address`, which more text may follow."""
    address, hostname, port, *_ = published.split()
    # Where a node's own name resolves to loopback, the address it published serves that node only.
    is_elsewhere = ip_address(address).is_loopback and hostname != socket.gethostname()
    candidates = (hostname,) if is_elsewhere else (address, hostname)
    errors = []
    for candidate in candidates:
        try:
            with ExitStack() as stack:
                connection = socket.create_connection((candidate, int(port)), timeout=timeout_s / len(candidates))
                stack.enter_context(connection)
                authenticate(connection, secret, purpose, timeout_s / len(candidates))
                stack.pop_all()  # the connection stays open
            keep_alive(connection)
            return connection
        except WrongSecret:
            raise
        except OSError as error:
            errors.append(f"{candidate}: {error}")
    raise OSError(f"{purpose}, but cannot reach it on {hostname}, port {port} ({'; '.join(errors)})")


def keep_alive(connection: socket.socket) -> None:
    """Has the kernel notice within half a minute that the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, seconds in KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds)


def allow_connections(world_size: int) -> None:
    """Lets this process open as many files as the system grants it: rank 0 keeps a connection to every process.

    The usual limit of 1024 would end a job of a thousand ranks. ValueError where the hard limit is too low.
    """
    needed = world_size + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"a job of {world_size} ranks needs {needed} open files in its rank 0, and the limit here is {hard} "
            "(ulimit -Hn). Raise it for the job's processes."
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
