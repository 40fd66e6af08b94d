#!/usr/bin/env python3
"""An interpreter that has imported torch, Megatron and vLLM already: what is started by it is forked from one that has.

    forked_python.py [-P] -m MODULE ...      asks the server of $FORKED_PYTHON for a process and stands for it
    forked_python.py ...                     is $PLAIN_PYTHON, for the small processes that a rank starts

The process is in the namespaces (network, processes, host name, mounts) of the one that asked: under the Slurm of these
tests it lives and dies on that node. It has its environment and its standard output and error. Signals are passed on,
and the status comes back; whoever asked and is gone takes it along. A fresh interpreter would spend twenty seconds of
every rank on imports.
"""

import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress

SPACES = ("net", "uts", "ipc", "mnt", "pid")  # joining the last one takes effect for children only
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def ask(path: str) -> int:
    """Has the server fork a process for these arguments; its exit status."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    environment = {name: value for name, value in os.environ.items() if name != "HACPO_MEGA_LAUNCHER_PID"}
    wanted = json.dumps({"argv": sys.argv[1:], "environment": environment, "cwd": os.getcwd()}).encode()
    socket.send_fds(server, [struct.pack("I", len(wanted))], [1, 2])
    server.sendall(wanted)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    status = server.recv(1)
    return status[0] if status else 137


def serve(path: str) -> None:
    """Forks a process for everyone who asks, until this is killed. `path` is there when it can be asked."""
    import preloaded  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{path}.new")
        door.listen(64)
        os.rename(f"{path}.new", path)
        while True:
            client, _ = door.accept()
            if os.fork() == 0:
                door.close()
                _stand_in(client)
            client.close()


def _stand_in(client: socket.socket) -> None:
    """In a child of the server: goes where the client is, has its process forked there and tells how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    (length, descriptors, *_) = socket.recv_fds(client, 4, 2)
    wanted, num_bytes = b"", struct.unpack("I", length)[0]
    while len(wanted) < num_bytes:
        wanted += client.recv(num_bytes - len(wanted))
    asker = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    libc = ctypes.CDLL(None, use_errno=True)
    elsewhere = [space for space in SPACES if os.readlink(f"/proc/{asker}/ns/{space}") != _own(space)]
    spaces = [os.open(f"/proc/{asker}/ns/{space}", os.O_RDONLY) for space in elsewhere]
    for space in spaces:
        assert libc.setns(space, 0) == 0, os.strerror(ctypes.get_errno())
        os.close(space)
    process = os.fork()
    if process == 0:
        client.close()
        _play(json.loads(wanted), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    _pass_on(client, process)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with suppress(OSError):  # whoever asked may be gone
        client.send(bytes([status if status >= 0 else 128 - status]))
    os._exit(0)


def _own(space: str) -> str:
    return os.readlink(f"/proc/self/ns/{space}")


def _pass_on(client: socket.socket, process: int) -> None:
    """Signals, until the process has ended; it is killed when whoever asked for it is gone."""
    ended = os.pidfd_open(process)  # no thread may wait for it: children would be born elsewhere than threads
    while ended not in (ready := select.select([client, ended], [], [])[0]):
        assert ready == [client]
        number = client.recv(1)
        os.kill(process, number[0] if number else signal.SIGKILL)
        if not number:
            return


def _play(wanted: dict, descriptors: list[int]) -> None:
    """The process that was asked for: `python -m MODULE ARGUMENTS`, as if it had just begun."""
    import runpy

    import torch

    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["cwd"])
    for number, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # The server's own stream may be of a file that can be sought in, and would be where this is a pipe.
    sys.stdout = open(1, "w", encoding=sys.stdout.encoding, closefd=False)  # noqa: SIM115
    sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.executable = os.path.abspath(__file__)
    _, module, *arguments = wanted["argv"]
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)  # or runpy would warn that it has been imported
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    else:
        status = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    if sys.argv[1:3] == ["-P", "-m"]:
        del sys.argv[1]  # a process of the server has no current folder on its path
    if sys.argv[1] == "-m":
        sys.exit(ask(os.environ["FORKED_PYTHON"]))
    else:
        os.execv(os.environ["PLAIN_PYTHON"], [os.environ["PLAIN_PYTHON"], *sys.argv[1:]])
