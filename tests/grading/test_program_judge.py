"""The judge of programs: cases by hand, limits, and what a program cannot reach from where it runs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from judged import questions

from hacpo_grading.graders import program
from hacpo_grading.graders.program import Case, Program
from hacpo_grading.judge import Judge
from hacpo_grading.judgement import Stop
from hacpo_grading.workers.system_calls import filter_program

pytestmark = pytest.mark.nightly

ADD = "a, b = map(int, input().split())\nprint(a + b)"
GOLD = json.dumps(
    [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "-1 1", "stdout": "0"}, {"stdin": "5 5", "stdout": "10"}]
)
LIMITS = {"cpu_s": 1, "memory_mb": 128, "num_processes": 8, "output_kb": 64}


@pytest.fixture(scope="module")
def isolated():
    return Program(**LIMITS)


def written(code):
    return f"I would write\n```python\n{code}\n```\nand be done."


def ran(judge, code, stdin=""):
    run = judge.run(code, Case(stdin, ""))
    return run.ending, run.stdout.decode(), run.stderr.decode()


@pytest.mark.parametrize(
    "code, all_or_nothing, share",
    [
        (ADD, 1.0, 1.0),
        (ADD.replace("print(a + b)", "print(a + b, '  \\n\\n')"), 1.0, 1.0),
        (ADD.replace("a + b", "3"), 0.0, 1 / 3),
        (ADD.replace("a + b", "abs(a) + abs(b)"), 0.0, 2 / 3),
        (ADD + "\nraise SystemExit(3)", 0.0, 0.0),
        ("print(", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_reward_is_in_the_cases(isolated, code, all_or_nothing, share):
    assert isolated("", written(code), GOLD) == all_or_nothing
    assert Program(graded=True, **LIMITS)("", written(code), GOLD) == pytest.approx(share)


def test_a_program_in_a_list_is_as_far_in_as_its_fence(isolated):
    indented = written(ADD).replace("\n", "\n   ")
    assert isolated("", "1. So " + indented, GOLD) == 1.0
    assert isolated("", indented.replace("\n   a, b", "\na, b").replace("\n   print", "\nprint"), GOLD) == 1.0


def test_text_without_a_program_has_no_answer(isolated):
    assert isolated("", ADD, GOLD) is None
    assert isolated("", f"<think>{written(ADD)}</think>", GOLD) is None


@pytest.mark.parametrize("gold", ["", "[]", "3", '[{"stdin": "1"}]', '[{"stdin": 1, "stdout": "1"}]', "[" * 100_000])
def test_a_gold_that_is_no_list_of_cases_is_refused(isolated, gold):
    with pytest.raises(ValueError, match="gold must be a JSON list"):
        isolated("", written(ADD), gold)


def test_limits(isolated):
    assert ran(isolated, "while True: pass")[0] == "signal 24"  # SIGXCPU
    assert "MemoryError" in ran(isolated, "x = bytearray(1 << 30)")[2]
    assert ran(isolated, "while True: print('a' * 1000)")[0] == "output longer than 64 KiB"
    assert "MemoryError" in ran(isolated, "open('x', 'wb').write(bytes(1 << 30))")[2]
    fill = "with open('x', 'wb') as f:\n  while True: f.write(bytes(1 << 20))"
    assert "OSError" in ran(isolated, fill)[2]  # 128 MiB: no space left, or a file too large


def test_a_fork_bomb_is_limited_and_ends_with_the_program(isolated):
    """RLIMIT_NPROC holds for root too, since a program of root's runs as nobody in a user namespace."""
    fork = "for i in range(4):\n  try: os.fork()\n  except OSError: pass\n"
    bomb = f"import os, time\n{fork}os.write(1, b'x')\ntime.sleep(1)"
    ending, printed, _ = ran(isolated, bomb)
    assert ending == "exit status 0"
    assert 2 <= len(printed) <= 8  # of 16 that were asked for


CHILDREN = """import os, time
for _ in range(6):
    if os.fork() == 0:
        kept = b"x" * (40 << 20)
        time.sleep(60)
time.sleep(60)"""
SOCKETS = """import os, socket, time
for _ in range(6):
    if os.fork() == 0:
        break
kept = [end for _ in range(25) for end in socket.socketpair()]
time.sleep(60)"""
FILES = """import time
kept = b"x" * (40 << 20)
with open("x", "wb") as file:
    for _ in range(31): file.write(bytes(1 << 20))
time.sleep(60)"""


@pytest.mark.parametrize("code", [CHILDREN, SOCKETS, FILES], ids=["children", "sockets", "files"])
def test_memory_is_bounded_for_all_together(code):
    """Each process keeps its own limit, and the sum does not: 240, 74 behind 350 descriptors, 71 MB, of 64."""
    ending, _, said = ran(Program(**LIMITS | {"memory_mb": 64}), code)
    assert ending == "signal 9" and "MiB held in all, of 64" in said


def test_memory_that_no_address_space_shows_is_refused(isolated):
    """By number, as a hostile program calls them; the C library's names would do for an honest one."""
    code = (
        "import ctypes, mmap, os\nlibc = ctypes.CDLL(None)\nx86 = os.uname().machine == 'x86_64'\n"
        "calls = (319, 425, 321, 298, 323, 29, 68, 248, 310, 278) if x86 else "
        "(279, 425, 280, 241, 282, 194, 186, 217, 270, 75)\n"
        "print({libc.syscall(n, 0, 0, 0, 0, 0) for n in (*calls, 435)})\n"
        "try: mmap.mmap(-1, 4096)\nexcept PermissionError: print('no shared memory')\n"
        "print(len(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)), os.path.exists('/dev/zero'))"
    )
    assert ran(isolated, code)[1] == "{-1}\nno shared memory\n4096 False\n"
    for family in (16, 40):  # netlink, and the sockets of virtual machines, which no namespace holds back
        assert "unreachable" in ran(isolated, f"import socket\nsocket.socket({family}, socket.SOCK_STREAM)")[2]


def test_honest_programs_go_on(isolated):
    for code in (
        "import asyncio\nasync def f(): await asyncio.sleep(0); print(1)\nasyncio.run(f())",
        "import threading\nthreading.stack_size(1 << 24)\nthreading.Thread(target=print, args=(1,)).start()",
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'], check=True)",
        "import multiprocessing as m\na, b = m.Pipe()\np = m.Process(target=b.send, args=(1,))\n"
        "p.start(); print(a.recv()); p.join()",
        "import shutil\nopen('a', 'w').write('1'); shutil.copyfile('a', 'b'); print(open('b').read())",
    ):
        assert ran(isolated, code)[:2] == ("exit status 0", "1\n"), code


def test_a_machine_without_a_filter_is_named():
    with pytest.raises(ValueError, match=r"no filter of system calls is known for riscv64; known: x86_64, aarch64"):
        filter_program("riscv64")


def test_nothing_is_left_running(isolated, monkeypatch):
    monkeypatch.setattr(program, "WALL_GRACE_S", -8.5)  # of 10 * cpu_s: 1.5 seconds
    mark = f"left over {os.getpid()}"
    daemon = f"import os, time\nmark = {mark!r}\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(1000)\n"
    assert ran(isolated, daemon + "print(1)")[:2] == ("exit status 0", "1\n")
    assert ran(isolated, daemon + "time.sleep(1000)")[0] == "out of wall time"
    left = [process for process in psutil.process_iter() if is_running(process, "main.py")]
    deadline = time.monotonic() + 30
    while left and time.monotonic() < deadline:
        left = [process for process in left if is_running(process, "main.py")]
        time.sleep(0.1)
    assert not left


def is_running(process, name):
    """True if a Python runs `name` of some /tmp; one that ends while it is looked at does not."""
    try:
        is_alive = process.name().startswith("python") and process.status() != psutil.STATUS_ZOMBIE
        return is_alive and any(part.endswith(f"/tmp/{name}") for part in process.cmdline())
    except psutil.Error:
        return False


def test_the_network_is_out_of_reach(isolated):
    for address in ("127.0.0.1", "8.8.8.8"):
        code = f"import socket\nsocket.create_connection(({address!r}, 53), timeout=5)"
        assert "Network is unreachable" in ran(isolated, code)[2]


def test_files_of_the_machine_are_out_of_reach(isolated, tmp_path):
    secret = tmp_path / "gold.jsonl"
    secret.write_text("the answers")
    assert "FileNotFoundError" in ran(isolated, f"print(open({str(secret)!r}).read())")[2]
    for place in ("/x", "/usr/x", f"{Path(os.__file__).parent}/x.py", "/dev/x", "/proc/sys/kernel/hostname"):
        assert any(e in ran(isolated, f"open({place!r}, 'w')")[2] for e in ("Read-only", "Permission", "FileNotFound"))
    assert ran(isolated, "open('of_a_program', 'w').write('y'); print(open('/tmp/of_a_program').read())")[1] == "y\n"
    assert not Path("/tmp/of_a_program").exists()


def test_a_program_has_no_rights_and_sees_no_process(isolated):
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nprint(os.getuid(), libc.unshare(0x10000000), "
        "libc.mount(b'none', b'/tmp', b'tmpfs', 0, b''), libc.chroot(b'.'))\n"
        "seen = sorted(int(p) for p in os.listdir('/proc') if p.isdigit())\n"
        "print(seen in ([1, 2], []), dict(os.environ).get('PYTHONPATH'))"
    )
    assert ran(isolated, code)[1] == "1000 -1 -1 -1\nTrue None\n"
    for victim in (1, os.getpid()):
        ending, _, said = ran(isolated, f"import os\nos.kill({victim}, 9)")
        # for root, init is another user's; for others, the kernel lets no process of a namespace kill its init
        is_spared = victim == 1 and os.getuid() and ending == "exit status 0"
        assert is_spared or "PermissionError" in said or "ProcessLookupError" in said


def test_options_are_checked_where_the_judge_is_made():
    for options, message in (
        ({"cpu_s": 0}, r"option cpu_s \(0\) must be a whole number from 1"),
        ({"graded": 1}, r"option graded \(1\) must be true or false"),
        ({"cpu": 1}, "it has no option cpu; its options are: graded, isolated, cpu_s"),
    ):
        with pytest.raises(ValueError, match=message):
            Judge("program", options=options)


def test_where_the_kernel_forbids_isolation_nothing_runs_by_itself(monkeypatch, tmp_path):
    """A sandbox that cannot unshare, as in a container without user namespaces."""
    forbidding = tmp_path / "sandbox.py"
    forbidding.write_text(program.SANDBOX.read_text().replace("LIBC.unshare, NAMESPACES", "LIBC.unshare, 1"))
    monkeypatch.setattr(program, "SANDBOX", forbidding)
    with pytest.raises(
        ValueError, match=r"cannot be run isolated on this machine \(no namespaces of its own: .*unshare"
    ):
        Program()
    assert Program(isolated=False, **LIMITS)("", written(ADD), GOLD) == 1.0


LOGIN_NODE = """import ctypes, resource, sys
ctypes.CDLL(None).prctl(24, 24)  # with CAP_SYS_RESOURCE programs of root's could raise a limit
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from hacpo_grading.judge import Judge
from judged import questions
from hacpo_grading.judgement import Stop
with Judge("program", options={"memory_mb": 2048}) as judge:
    print(*(one.reward for one in judge.judge(questions([""], [sys.argv[2]], [sys.argv[1]], [Stop.EOS]))))"""


def test_a_login_node_with_little_memory_judges():
    """A limit that an administrator has set can only be lowered: below that of a worker, and of a program."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LOGIN_NODE, written(ADD), GOLD]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)
    assert (done.stdout, done.stderr) == ("1.0\n", "")


def test_in_the_judge_and_explained():
    with Judge("program", options=LIMITS | {"graded": True}) as judge:
        texts = [written(ADD), written(ADD.replace("a + b", "3")), "no program"]
        found = judge.judge_and_explain(questions([""] * 3, [GOLD] * 3, texts, [Stop.EOS] * 3))
        assert [judgement.reward for judgement, _ in found] == [1.0, pytest.approx(1 / 3), 0.0]
        failed = found[1][1]
        assert (failed["failed case"], failed["expected"], failed["printed"]) == (2, "0", "3\n")
        assert found[0][1]["failed case"] is None
        (refused,) = judge.judge(questions([""], ["no cases"], [written(ADD)], [Stop.EOS]))
        assert not refused.is_judged
        assert judge.take_report().first_error.startswith("ValueError: gold must be a JSON list")


def test_an_environment_behind_a_link_is_seen(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "linked"))
    assert {str(tmp_path / "real"), str(tmp_path / "linked")} <= set(program.visible_folders())
