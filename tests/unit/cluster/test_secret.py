"""Attacks on the sockets of a job: who does not know its secret is not let in, learns nothing, and holds up nobody."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from unittest import mock

import pytest

from hacpo_mega.cluster.launcher_env import LauncherEnv
from hacpo_mega.cluster.security import secret as secrets_of_jobs
from hacpo_mega.cluster.security.private_folder import folder_on_node, job_folder, own_folder
from hacpo_mega.cluster.security.secret import (
    MAX_CALLERS,
    SECRET,
    AuthError,
    AuthListener,
    Secret,
    WrongSecret,
    authenticate,
    forget_secret,
    new_secret,
    share_secret,
)
from hacpo_mega.jobs.local import launcher_environment
from hacpo_mega.preflight.meeting import ProbeListener, probe

RIGHT, WRONG = Secret(bytes(range(32))), Secret(bytes(32))
LIMIT_S = 300.0  # of a hang, not of a slow machine
PURPOSE = "0 watches 1"


@pytest.fixture
def listener():
    server = socket.create_server(("127.0.0.1", 0))
    with closing(AuthListener(server, RIGHT, PURPOSE)) as listener:
        listener.address = server.getsockname()
        yield listener


def call(listener: AuthListener) -> socket.socket:
    connection = socket.create_connection(listener.address)
    connection.settimeout(LIMIT_S)
    return connection


def assert_lets_in(listener: AuthListener) -> None:
    """One who knows the secret, whatever else has happened there."""
    admitted = []
    thread = threading.Thread(target=lambda: admitted.append(listener.admit(LIMIT_S)))
    thread.start()
    with call(listener) as caller:
        authenticate(caller, RIGHT, PURPOSE, LIMIT_S)
        thread.join()
        with admitted[0] as host:
            caller.sendall(b"phase load\n")
            host.settimeout(LIMIT_S)
            assert host.recv(64) == b"phase load\n"  # not a byte of it was taken for the handshake


def listener_turns(listener: AuthListener) -> None:
    """Lets the listener hear what has been said to it."""
    with pytest.raises(TimeoutError, match="no process with the job's secret"):
        listener.admit(0.1)


def is_sent_away(listener: AuthListener, caller: socket.socket) -> bool:
    """Nothing more comes than the 32 bytes with which everybody is met, and then the connection ends."""
    heard, end = b"", time.monotonic() + LIMIT_S
    caller.settimeout(0.1)
    while time.monotonic() < end:
        listener_turns(listener)
        with suppress(TimeoutError):
            try:
                more = caller.recv(64)
            except ConnectionError:
                more = b""
            if not more:
                return len(heard) <= 32
            heard += more
    return False


def garbage(caller: socket.socket) -> None:
    caller.sendall(b"\x00\xff" * 48)


def a_megabyte_without_a_line(caller: socket.socket) -> None:
    with suppress(ConnectionError):  # the listener does not read it
        caller.sendall(b"0" * (1 << 20))


def what_was_said_before(caller: socket.socket) -> None:
    """The rank's number in a line, which was all that a neighbour had to say."""
    caller.sendall(b"0\n")
    caller.shutdown(socket.SHUT_WR)


def its_own_words(caller: socket.socket) -> None:
    """The listener's words are said back to it."""
    caller.sendall(caller.recv(32, socket.MSG_WAITALL) * 3)


def an_empty_proof(caller: socket.socket) -> None:
    caller.sendall(bytes(64))


def half_a_proof(caller: socket.socket) -> None:
    caller.sendall(bytes(63))
    caller.shutdown(socket.SHUT_WR)


def the_proof_of_the_other_role(caller: socket.socket) -> None:
    challenges = caller.recv(32, socket.MSG_WAITALL) + bytes(32)
    caller.sendall(bytes(32) + RIGHT.proof("host", PURPOSE, challenges))


def the_proof_for_another_place(caller: socket.socket) -> None:
    challenges = caller.recv(32, socket.MSG_WAITALL) + bytes(32)
    caller.sendall(bytes(32) + RIGHT.proof("caller", "2 watches 3", challenges))


def a_wrong_secret(caller: socket.socket) -> None:
    challenges = caller.recv(32, socket.MSG_WAITALL) + bytes(32)
    caller.sendall(bytes(32) + WRONG.proof("caller", PURPOSE, challenges))


ATTACKS = [
    garbage,
    a_megabyte_without_a_line,
    what_was_said_before,
    its_own_words,
    an_empty_proof,
    half_a_proof,
    the_proof_of_the_other_role,
    the_proof_for_another_place,
    a_wrong_secret,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_who_does_not_show_the_secret_is_sent_away(listener, attack):
    with call(listener) as stranger:
        attacking = threading.Thread(target=attack, args=(stranger,))
        attacking.start()
        assert_lets_in(listener)
        attacking.join()
        assert is_sent_away(listener, stranger)


def test_a_recorded_handshake_opens_nothing(listener):
    """Every word of a caller that was let in, said again to the same gate."""
    words = []

    def listen_in(connection: socket.socket) -> None:
        words.append(connection.recv(32, socket.MSG_WAITALL))
        challenges = words[0] + bytes(32)
        words.append(bytes(32) + RIGHT.proof("caller", PURPOSE, challenges))
        connection.sendall(words[1])

    with call(listener) as caller:
        telling = threading.Thread(target=listen_in, args=(caller,))
        telling.start()
        listener.admit(LIMIT_S).close()
        telling.join()
    with call(listener) as stranger:
        stranger.sendall(words[1])
        assert is_sent_away(listener, stranger)


@pytest.mark.parametrize("num_silent", [100, MAX_CALLERS + 50])
def test_silent_strangers_hold_up_nobody(listener, num_silent):
    silent = []
    for start in range(0, num_silent, 100):  # as many as a backlog takes
        silent += [call(listener) for _ in range(min(100, num_silent - start))]
        listener_turns(listener)
    assert_lets_in(listener)
    for stranger in silent:
        stranger.close()


def test_strangers_that_hang_up_or_reset_hold_up_nobody(listener):
    for _ in range(50):
        stranger = call(listener)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        stranger.close()
    assert_lets_in(listener)


@pytest.mark.parametrize("speech", [b"", b"x" * 31, b"y" * 64], ids=["hangs up", "too little", "no proof"])
def test_a_host_that_does_not_know_the_secret_is_not_believed(speech):
    """As one that took the port of a rank that has ended."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend() -> None:
            host, _ = server.accept()
            with host, suppress(OSError):
                host.sendall(speech)
                host.shutdown(socket.SHUT_WR)
                host.recv(1 << 16)

        pretending = threading.Thread(target=pretend)
        pretending.start()
        with (
            socket.create_connection(server.getsockname()) as caller,
            pytest.raises(OSError, match="the listener there"),
        ):
            authenticate(caller, RIGHT, PURPOSE, LIMIT_S)
        pretending.join()


def test_a_host_that_says_nothing_is_waited_for_no_longer_than_asked():
    said = pytest.raises(AuthError, match="does not answer like a process of this job")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as caller,
        said,
    ):
        authenticate(caller, RIGHT, PURPOSE, 0.2)


def test_a_neighbours_door_is_known_by_name_and_secret():
    here = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with mock.patch.dict(os.environ, here), ProbeListener("n1", RIGHT) as door:
        assert probe("n1", RIGHT, ["127.0.0.1"], door.port) is None
        assert "hangs up" in probe("n2", RIGHT, ["127.0.0.1"], door.port)
        assert "hangs up" in probe("n1", WRONG, ["127.0.0.1"], door.port)


def env(num_local: int) -> LauncherEnv:
    return LauncherEnv(0, 4, 0, num_local, "here", (), "127.0.0.1", 0, launcher_keeps_store=False)


def test_a_job_on_several_machines_without_a_secret_is_told_how_to_set_it(monkeypatch):
    """The line, said to a shell, is what was missing."""
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(ValueError, match="HACPO_MEGA_SECRET is not set") as refused:
        Secret.of_job(env(num_local=2))
    command = str(refused.value).split("`")[1]
    said = subprocess.run(["bash", "-c", f"{command}; echo ${SECRET}"], capture_output=True, text=True, check=True)
    monkeypatch.setenv(SECRET, said.stdout.strip())
    assert Secret.of_job(env(num_local=2)).key == bytes.fromhex(said.stdout.strip())


@pytest.mark.parametrize("said", ["1234", "x" * 64, "0" * 62, "é" * 64])
def test_a_secret_that_is_none_is_refused_and_not_shown(monkeypatch, said):
    monkeypatch.setenv(SECRET, said)
    with pytest.raises(ValueError, match="must be at least 64 hexadecimal digits") as refused:
        Secret.of_job(env(num_local=2))
    assert said not in str(refused.value)


def test_a_secret_is_never_shown():
    secret = Secret(bytes.fromhex(new_secret()))
    assert secret.key.hex() not in f"{secret!r} {secret}" and str(secret.key) not in f"{secret!r} {secret}"


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The folder of all users, and the cache of this user's home; nothing is in either."""
    monkeypatch.delenv(SECRET, raising=False)
    shared, cache = tmp_path / "shared", tmp_path / "home/.cache"
    shared.mkdir(mode=0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return shared, cache


def test_ranks_started_by_hand_on_one_machine_share_a_private_secret_file(places):
    assert Secret.of_job(env(4)) == Secret.of_job(env(4))
    (folder,) = places[1].iterdir()
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    assert file.name == f"secret-{socket.gethostname()}" and not [*places[0].iterdir()]


@pytest.mark.parametrize("taken", ["a file", "a link", "a folder that others may write", "another's folder"])
def test_a_name_that_another_user_has_taken_is_gone_round(places, taken):
    """Under TMPDIR anybody can have it first, and nobody can take it from him."""
    shared, cache = places
    name = shared / f"hacpo_mega-{os.getuid()}"
    if taken == "a file":
        name.touch()
    elif taken == "a link":
        name.symlink_to(shared)
    else:
        name.mkdir()
        name.chmod(0o777 if "write" in taken else 0o700)
    if "another's" in taken:
        if os.getuid() != 0:
            pytest.skip("only root can play a second user")
        os.chown(name, NOBODY, NOBODY)
    assert folder_on_node() == cache / "hacpo_mega" / socket.gethostname()
    assert own_folder() == cache / "hacpo_mega"
    cache.joinpath("hacpo_mega").chmod(0o777)
    with pytest.raises(ValueError, match=r"neither .*/home/.* nor .*/shared/.* is a folder of yours.*: set TMPDIR"):
        own_folder()


def test_a_home_that_is_read_only_is_gone_round(places, monkeypatch):
    """In a container, say, which has another machine's: the folder is there already."""
    shared, cache = places
    (cache / "hacpo_mega").mkdir(parents=True, mode=0o700)
    is_allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: cache not in Path(path).parents and is_allowed(path, mode))
    assert own_folder() == shared / f"hacpo_mega-{os.getuid()}"
    assert Secret.of_job(env(4)) == Secret.of_job(env(4))


def test_a_user_without_a_home_has_his_folder_where_all_have_theirs(places, monkeypatch):
    places[1].parent.touch()  # no folder can be made in it
    assert own_folder() == folder_on_node() == places[0] / f"hacpo_mega-{os.getuid()}"


def test_both_sides_say_that_their_secrets_differ(listener):
    turned_away = []
    listener._on_wrong_secret = turned_away.append
    for _ in range(2):
        with call(listener) as caller:
            thread = threading.Thread(target=listener_turns, args=(listener,))
            thread.start()
            with pytest.raises(WrongSecret, match="it has another secret"):
                authenticate(caller, WRONG, PURPOSE, LIMIT_S)
            thread.join()
    assert turned_away == ["127.0.0.1"]


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2"}


def task(rank: int, **changes: str) -> dict[str, str]:
    """The variables of a task of one of two nodes; torchrun's names, which come first, say nothing."""
    none = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "")
    return STEP | none | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)} | changes


@pytest.fixture
def no_secret(monkeypatch):
    monkeypatch.setattr(secrets_of_jobs, "POLL_S", 0.01)
    for name in (SECRET, secrets_of_jobs.SECRET_FILE):
        monkeypatch.delenv(name, raising=False)


def shared(run_dir: Path, rank: int, patience_s: float = LIMIT_S, **changes: str) -> str | None:
    with mock.patch.dict(os.environ, task(rank, **changes)):
        share_secret(run_dir, patience_s)
        told, made = os.environ.get(SECRET), os.environ.get(secrets_of_jobs.SECRET_FILE)
    if made:
        os.environ[secrets_of_jobs.SECRET_FILE] = made
    return told


def test_tasks_of_one_step_on_two_nodes_agree_by_a_file_of_their_user(tmp_path, no_secret):
    (tmp_path / "link").symlink_to("runs/run")
    first = shared(tmp_path / "runs/run", 0)
    (file,) = (tmp_path / "runs").iterdir()
    assert file.name == ".run.7.1.0.secret" and file.stat().st_mode & 0o777 == 0o600 and len(first) == 64
    assert shared(tmp_path / "link", 1) == first
    with pytest.raises(ValueError, match=r"and rank 0 has made no .*\.run\.7\.2\.0\.secret .*: say `export "):
        shared(tmp_path / "link", 1, 0.05, SLURM_STEP_ID="2")
    forget_secret()
    assert not file.exists() and secrets_of_jobs.SECRET_FILE not in os.environ


@pytest.mark.parametrize(
    "changes",
    [{SECRET: "0" * 64}, {"SLURM_TASKS_PER_NODE": "2"}, {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}],
    ids=["exported", "one node", "one machine's launcher"],
)
def test_no_file_is_made_where_the_secret_is_there_or_not_needed(tmp_path, no_secret, changes):
    assert shared(tmp_path / "run", 0, **changes) == changes.get(SECRET)
    assert not list(tmp_path.iterdir())


def test_a_planted_secret_file_is_not_believed_and_a_stale_one_replaced(tmp_path, no_secret):
    file = tmp_path / ".run.7.1.0.secret"
    for plant in (lambda: file.write_text("0" * 64), lambda: file.symlink_to("target"), lambda: os.mkfifo(file)):
        plant()
        with pytest.raises(ValueError, match="rank 0 has made no "):
            shared(tmp_path / "run", 1, 0.05)
        file.unlink()
    file.write_text("0" * 64)
    file.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(file, NOBODY, NOBODY)
        with pytest.raises(ValueError, match="rank 0 has made no "):
            shared(tmp_path / "run", 1, 0.05)
    made = shared(tmp_path / "run", 0)
    assert shared(tmp_path / "run", 1) == made != "0" * 64
    forget_secret()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"by which the nodes of this job agree: .*; say `export ") as refused:
        shared(tmp_path / "file" / "run", 0)
    assert "\n" not in str(refused.value)


NOBODY = 65534


@pytest.mark.skipif(os.getuid() != 0, reason="only root can play a second user")
def test_a_second_user_reaches_neither_the_store_nor_the_secret(tmp_path, monkeypatch):
    """Attacks fail although every folder above is open to the user; he learns nothing that a name does not say."""
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    with job_folder() as folder:
        told = launcher_environment(0, 1, folder, new_secret())
        store = Path(told["HACPO_MEGA_STORE"])
        store.write_text("addresses")
        rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=os.environ | told)
        attacks = [
            f"cat {store}",
            f"ls {folder}",
            f"echo x >> {store}",
            f"rm -rf {folder}/store",
            f"mv {folder} {folder}.gone",
            f"ln -sf /etc/passwd {folder}/store",
            f"cat /proc/{rank.pid}/environ",
            f"ls /proc/{rank.pid}/fd",
            f"kill -9 {rank.pid}",
        ]
        for attack in attacks:
            done = subprocess.run(["sh", "-c", attack], user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True)
            assert done.returncode != 0 and done.stdout == b"", attack
        assert store.read_text() == "addresses" and rank.poll() is None
        rank.communicate(b"\n")
    assert not folder.exists()
