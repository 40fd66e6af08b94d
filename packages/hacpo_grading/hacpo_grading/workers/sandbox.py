"""The program that runs an untrusted program, once, on one standard input, and ends everything that this started.

It is started as a fresh interpreter by program.py and reads one JSON line:
    {"program", "stdin", "python", "visible", "cpu_s", "memory_bytes", "num_processes", "disk_bytes", "filter",
    "is_isolated"}
then it becomes, through namespaces of its own (user, mount, pid, network, ipc, host name):
- a file tree that holds the folders `visible` (read only: the interpreter and the system libraries), a few devices, and
  /tmp, a file system in memory of `disk_bytes`, where the program lies and works. Nothing else of the machine is there;
- no network, not even to itself, and no process of the machine;
- for root, the user nobody, so that the limit on processes holds: the kernel never limits root's.
- no system call that hides memory or that no answer needs (the seccomp `filter` of system_calls.py).
The limits: RLIMIT_CPU and RLIMIT_AS for each process, RLIMIT_NPROC for all of them together, few open files, no core
files. Memory is bounded for all of them together too: this process adds up what they hold (their share of pages, /tmp,
buffers behind descriptors) every few milliseconds, and ends them when it is more than `memory_bytes`.
The program runs below an init of its own, and when that ends, by itself or with this process, the kernel ends whatever
is left.
Without `is_isolated` there are the limits and a new session only: files, network and processes of the user are open to
the program, and a child that leaves the session stays. None of this protects from a vulnerability of the kernel.
Exit status: the program's, 128 + n for signal n, SETUP_FAILED when the program was never started (the reason on
standard error).
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import tempfile
from pathlib import Path

SETUP_FAILED = 121
NOBODY = 65534
INSIDE = 1000
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 442, -100, 0x8000, 1, 2
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
# not /dev/zero: a shared mapping of it is memory that is not counted
DEVICES = ("null", "urandom", "random")
ROOT = "/sys"  # where the file tree is made: a mount point that every machine has and no interpreter lies in
OURS = 2  # this program and its init, which only for root are another user than the program
MAX_FILES = 64
MAX_SIGNALS = 256
MAX_INODES = 4096
WATCH_EVERY_MS = 5
# what the kernel may hold behind a descriptor: the default buffer of a socket, a pipe's is smaller
BUFFER_BYTES = 212_992
BUFFER_SETTING = Path("/proc/sys/net/core/wmem_default")
LIBC = ctypes.CDLL(None, use_errno=True)


def _call(name: str, function, *arguments) -> None:
    if function(*arguments) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    named = source.encode(), target.encode(), kind.encode()
    _call(f"mount {target}", LIBC.mount, *named, ctypes.c_ulong(flags), data.encode())


def _die_with_parent(parent: int) -> None:
    _call("prctl", LIBC.prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(SETUP_FAILED)


def enter_namespaces() -> None:
    """Enters new namespaces. Id INSIDE is this user there; for root it is nobody, and root stays 0 to make the tree."""
    parent, user, group = os.getppid(), os.getuid(), os.getgid()
    if user == 0:
        _unshare_below_root()
    else:
        _call("unshare", LIBC.unshare, NAMESPACES)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{INSIDE} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{INSIDE} {group} 1")
    _die_with_parent(parent)


def _unshare_below_root() -> None:
    """Unshares as root. A child maps the users: only a process outside may give a namespace a second one."""
    me = os.getpid()
    read_end, write_end = os.pipe()
    writer = os.fork()
    if writer == 0:
        os.close(write_end)
        if os.read(read_end, 1):
            for ids in ("uid_map", "gid_map"):
                Path(f"/proc/{me}/{ids}").write_text(f"0 0 1\n{INSIDE} {NOBODY} 1")
        os._exit(0)
    try:
        _call("unshare", LIBC.unshare, NAMESPACES)
        os.write(write_end, b"1")
    finally:
        os.close(write_end)
        os.waitpid(writer, 0)


def _become_program() -> None:
    """Drops root's rights for good; another user loses them with the next execve."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(INSIDE, INSIDE, INSIDE)
        os.setresuid(INSIDE, INSIDE, INSIDE)
    _call("prctl", LIBC.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _filter_calls(steps: bytes) -> None:
    """Installs a filter of system calls for good, for this process and all that it starts."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))

    program = Program(len(steps) // 8, steps)
    _call("seccomp", LIBC.prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)


def enter_tree(visible: list[str], disk_bytes: int) -> None:
    """Makes the file tree in memory and moves into it; the working folder is its /tmp."""
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    root = ROOT
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    # Before the visible folders: an interpreter may lie below /tmp, and a later mount would hide it.
    os.makedirs(f"{root}/tmp")
    _mount("tmpfs", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_bytes},nr_inodes={MAX_INODES},mode=1777")
    for folder in visible:
        _bind(Path(folder), Path(root + folder))
    os.makedirs(f"{root}/dev", exist_ok=True)
    for device in DEVICES:
        Path(f"{root}/dev/{device}").touch()
        _mount(f"/dev/{device}", f"{root}/dev/{device}", "", MS_BIND)
    os.makedirs(f"{root}/proc", exist_ok=True)
    with contextlib.suppress(OSError):  # a container may forbid a new /proc; then there is none
        _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV)
    os.chroot(root)
    os.chdir("/")
    _set_mount("/", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, AT_RECURSIVE)
    _set_mount("/tmp", 0, MOUNT_ATTR_RDONLY, 0)
    os.chdir("/tmp")


def _bind(folder: Path, place: Path) -> None:
    """Mounts a folder at its own path in the tree; a link stays a link, since its target is visible too."""
    if folder.is_symlink():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(folder.readlink())
    elif folder.exists():
        place.mkdir(parents=True, exist_ok=True)
        _mount(str(folder), str(place), "", MS_BIND | MS_REC)


def _set_mount(path: str, sets: int, clears: int, flags: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(sets, clears, 0, 0)
    size = ctypes.sizeof(attributes)
    _call("mount_setattr", LIBC.syscall, SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, size)


def _limit(kind: int, most: int, hard: int | None = None) -> None:
    """Limits this process; an administrator may have set a lower limit, which cannot be raised and stays."""
    with contextlib.suppress(ValueError):
        resource.setrlimit(kind, (most, most if hard is None else hard))


def run_program(order: dict, folder: str) -> int:
    """Runs the program in `folder` below the limits, and returns its exit status as a shell would."""
    Path(folder, "main.py").write_text(order["program"], encoding="utf-8", errors="surrogatepass")
    Path(folder, "stdin").write_text(order["stdin"], encoding="utf-8", errors="surrogatepass")
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(f"{folder}/stdin", os.O_RDONLY), 0)
            cpu_s = order["cpu_s"]
            _limit(resource.RLIMIT_CORE, 0)
            _limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)
            _limit(resource.RLIMIT_FSIZE, order["disk_bytes"])
            _limit(resource.RLIMIT_AS, order["memory_bytes"])
            if order["is_isolated"]:  # elsewhere it would count every process of the user
                most = order["num_processes"] + (OURS if os.getuid() else 0)
                _limit(resource.RLIMIT_NPROC, most)
                _limit(resource.RLIMIT_NOFILE, MAX_FILES)
                _limit(resource.RLIMIT_SIGPENDING, MAX_SIGNALS)
                _become_program()
                _filter_calls(bytes.fromhex(order["filter"]))
            environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
            python = order["python"]
            os.execve(python, [python, "-B", "-s", f"{folder}/main.py"], environment)
        except (OSError, ValueError) as error:
            print(f"the program cannot be started: {error}", file=sys.stderr, flush=True)
        os._exit(SETUP_FAILED)
    while True:  # an init also collects what the program's children leave behind
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _as_init(order: dict) -> None:
    """Runs as the first process of the new pid namespace, whose end ends all others."""
    _call("prctl", LIBC.prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        enter_tree(order["visible"], order["disk_bytes"])
    except OSError as error:
        print(f"no file tree of its own: {error}", file=sys.stderr, flush=True)
        os._exit(SETUP_FAILED)
    os._exit(run_program(order, "/tmp"))


def watch(init: int, memory_bytes: int, buffer_bytes: int) -> int:
    """The exit status of an init, which is ended with all below it when they hold more than `memory_bytes` together."""
    ended = select.poll()
    ended.register(os.pidfd_open(init), select.POLLIN)
    while not ended.poll(WATCH_EVERY_MS):
        held = sum(_held_by(process, buffer_bytes) for process in _inside(init)) + _held_in_files()
        if held > memory_bytes:
            os.kill(init, signal.SIGKILL)
            print(f"ended: {held >> 20} MiB held in all, of {memory_bytes >> 20}", file=sys.stderr, flush=True)
            break
    _, status = os.waitpid(init, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _inside(init: int) -> list[Path]:
    """Folders in /proc of the processes below an init: in its own /proc, else in the machine's, by their parents."""
    own = Path(ROOT, "proc")
    if (own / "1").is_dir():
        return [own / name for name in os.listdir(own) if name.isdigit() and name != "1"]
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc") if own.is_dir() else ()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended while it was looked at
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
    found = [init]
    for process in found:  # grows while it is walked
        found += [child for child, parent in parents.items() if parent == process]
    return [Path(f"/proc/{process}") for process in found[1:]]


def _held_by(process: Path, buffer_bytes: int) -> int:
    """Bytes that a process holds: its share of the pages it maps, on swap too, and what its descriptors may keep."""
    try:
        fields = dict(line.split(":") for line in (process / "smaps_rollup").read_text().splitlines()[1:])
        pages = sum(int(fields[name].split()[0]) for name in ("Pss", "SwapPss") if name in fields)
        return (pages << 10) + len(os.listdir(process / "fd")) * buffer_bytes
    except PermissionError:  # it has not become the program yet, or hides: then all that it maps and may open counts
        return _resident_bytes(process) + MAX_FILES * buffer_bytes
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0


def _resident_bytes(process: Path) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int((process / "statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def _held_in_files() -> int:
    """Bytes of the file system in memory; its mount is seen from here as soon as the init has made it."""
    disk = os.statvfs(f"{ROOT}/tmp") if os.path.isdir(f"{ROOT}/tmp") else None
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize if disk else 0


def main() -> int:
    """Reads the order, runs the program, and returns its exit status."""
    order = json.loads(sys.stdin.readline())
    if not order["is_isolated"]:
        _die_with_parent(os.getppid())
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            return run_program(order, folder)
    # the machine's setting cannot be read from a network namespace of its own
    buffer_bytes = int(BUFFER_SETTING.read_text()) if BUFFER_SETTING.is_file() else BUFFER_BYTES
    try:
        enter_namespaces()
    except OSError as error:
        print(f"no namespaces of its own: {error}", file=sys.stderr, flush=True)
        return SETUP_FAILED
    init = os.fork()
    if init == 0:
        _as_init(order)
    return watch(init, order["memory_bytes"], buffer_bytes)


if __name__ == "__main__":
    sys.exit(main())
