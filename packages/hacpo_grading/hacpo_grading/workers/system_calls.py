"""The system calls that an untrusted program may not make, as a seccomp filter (a program of the kernel's classic BPF).

Three kinds are refused. Calls that hold memory outside every address space, since the bound on memory (sandbox.py)
could not see it: memfd, shared anonymous mappings (they outlive what is unmapped of them), SysV and POSIX queues,
kernel rings, pages given to pipes, buffers made larger than their default. Interfaces that no answer
needs: io_uring, bpf, perf, keys, modules, mounts, new namespaces, other processes' memory. And all sockets but those
between own processes.
A call of another architecture (32 bits, x32) ends the program. Elsewhere: who installs the filter (sandbox.py).
"""

import errno
import struct
from dataclasses import dataclass

LOAD, AND, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
X32 = 0x40000000
ALL_BITS = 0xFFFFFFFF
NEW_NAMESPACES = 0x7E020000
AF_UNIX, SO_SNDBUF, F_SETPIPE_SZ, MAP_SHARED_ANONYMOUS = 1, 7, 1031, 0x21

# (x86-64, aarch64); None where the architecture has no such call
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "userfaultfd": (323, 282), "remap_file_pages": (216, 234),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "inotify_init": (253, None), "inotify_init1": (294, 26),
    "fanotify_init": (300, 262), "io_setup": (206, 0), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77),
    "sendfile": (40, 71), "bpf": (321, 280), "perf_event_open": (298, 241), "seccomp": (317, 277),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "ptrace": (101, 117), "kcmp": (312, 272),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "personality": (135, 92), "modify_ldt": (154, None), "iopl": (172, None), "ioperm": (173, None),
    "uselib": (134, None), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "quotactl": (179, 60), "quotactl_fd": (443, 443), "swapon": (167, 224),
    "swapoff": (168, 225), "reboot": (169, 142), "acct": (163, 89), "syslog": (103, 116), "move_pages": (279, 239),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "migrate_pages": (256, 238), "lookup_dcookie": (212, 18),
}  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """A call that is refused by one of its arguments: when its bits of `mask` are `value`, or are not."""

    numbers: tuple[int, int]
    argument: int
    mask: int
    value: int
    is_refused_when_equal: bool
    error: int


CONDITIONS = (
    Condition((56, 220), 0, NEW_NAMESPACES, 0, False, errno.EPERM),  # clone
    Condition((41, 198), 0, ALL_BITS, AF_UNIX, False, errno.ENETUNREACH),  # socket
    Condition((53, 199), 0, ALL_BITS, AF_UNIX, False, errno.ENETUNREACH),  # socketpair
    Condition((54, 208), 2, ALL_BITS, SO_SNDBUF, True, errno.EPERM),  # setsockopt
    Condition((72, 25), 1, ALL_BITS, F_SETPIPE_SZ, True, errno.EPERM),  # fcntl
    Condition((9, 222), 3, MAP_SHARED_ANONYMOUS, MAP_SHARED_ANONYMOUS, True, errno.EPERM),  # mmap
)
CLONE3 = 435  # its flags lie in memory, where no filter looks: the C library then takes clone
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def filter_program(machine: str) -> bytes:
    """The filter for a machine (`os.uname().machine`), as the kernel takes it. ValueError for one not known here."""
    if machine not in MACHINES:
        raise ValueError(f"no filter of system calls is known for {machine}; known: {', '.join(MACHINES)}")
    column, architecture = MACHINES[machine]
    steps = [(LOAD, 0, 0, ARCHITECTURE), (IF_EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if machine == "x86_64":
        steps += [(IF_AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    for numbers in REFUSED.values():
        if numbers[column] is not None:
            steps += _refuse(numbers[column], errno.EPERM)
    steps += _refuse(CLONE3, errno.ENOSYS)
    for condition in CONDITIONS:
        jumps = (0, 1) if condition.is_refused_when_equal else (1, 0)
        steps += [
            (IF_EQUAL, 0, 5, condition.numbers[column]),
            (LOAD, 0, 0, ARGUMENTS + 8 * condition.argument),
            (AND, 0, 0, condition.mask),
            (IF_EQUAL, *jumps, condition.value),
            (RETURN, 0, 0, ERROR | condition.error),
            (LOAD, 0, 0, NUMBER),
        ]
    steps.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


def _refuse(number: int, error: int) -> list[tuple[int, int, int, int]]:
    return [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ERROR | error)]
