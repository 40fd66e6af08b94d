"""Before any test: without a GPU the Triton kernels run in Triton's interpreter. And who runs which tests, and when.

Triton decides at import, so hacpo_kernels is imported here under the variable; afterwards the variable is as it was,
so that engines and ranks which tests start do not interpret their own kernels.
"""

import atexit
import gc
import importlib
import os
import signal
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from budgets import (
    LAB,
    MAKE_TEST,
    Part,
    file_of,
    is_left_out,
    order,
    over_budget,
    read_budgets,
    scope_of,
    tier_of,
    write_budgets,
)
from xdist.scheduler import LoadScopeScheduling

# A million objects come while tests are collected, and stay: nothing walks them, then or later (pytest_runtestloop).
gc.disable()

# Signals that nohup or a shell's background job ignores would be ignored by everything that tests start.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)

# No test is about speed: drawn examples take longer on a crowded machine, and that is no finding.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")


@pytest.fixture(autouse=True, scope="session")
def open_streams() -> Iterator[None]:
    """Keeps the streams that pytest captures open: a call to close one is a warning with the stack of its caller.

    A closed stream fails every later test of the process. absl's handler closes the error stream of Megatron's import
    when logging is configured anew while another stream stands in its place.
    """

    def close() -> None:
        callers = traceback.format_list(traceback.extract_stack()[-9:-1])
        warnings.warn(f"the standard output or error was closed by\n{''.join(callers)}", stacklevel=2)

    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.close = stream.buffer.close = close
    yield
    for stream in streams:
        del stream.close, stream.buffer.close


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Restores the environment after each test: vLLM sets LOCAL_WORLD_SIZE and LD_PRELOAD where it checks a config.

    A test that lowers the priority of its process fails: nobody can raise it again, and later tests would starve.
    """
    environment, priority = dict(os.environ), os.getpriority(os.PRIO_PROCESS, 0)
    yield
    assert os.getpriority(os.PRIO_PROCESS, 0) == priority
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)


def interpret_kernels() -> None:
    """Imports the kernels for the processor, where there is no GPU; not in a process that only leads workers."""
    import torch

    if torch.cuda.is_available():
        return
    # A CPU environment on a machine with GPUs runs these tests on the CPU, and says so (cluster/machine/device.py).
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    # Gluon too: Triton imports it at the first launch, and it refuses a half-interpreted language then.
    for module in ("hacpo_kernels", "triton.experimental.gluon"):
        importlib.import_module(module)
    if before is None:
        del os.environ["TRITON_INTERPRET"]


class ByScope(LoadScopeScheduling):
    """Gives tests to workers under `pytest -n`; support/budgets.py says what stays on one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(file_of(nodeid))


class Seconds:
    """Adds up what every file took, and says at the end who took more than budgets.toml allows."""

    def __init__(self, fails: bool, writes: bool) -> None:
        self.fails, self.writes, self.by_part = fails, writes, defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = file_of(report.nodeid)
        self.by_part[Part(tier_of(report.keywords, file), file)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.fails and over_budget(self.by_part, read_budgets())[1] and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.writes and session.exitstatus == pytest.ExitCode.OK:
            write_budgets(self.by_part)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slowness, lines = over_budget(self.by_part, read_budgets())
        if lines:
            terminalreporter.section(f"over their budgets, on a machine {slowness:.1f} times as slow as they allow")
            terminalreporter.line("\n".join(lines))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hold-budgets", action="store_true", help="fail if a file takes longer than tests/budgets.toml")
    parser.addoption("--write-budgets", action="store_true", help="write this run's seconds to tests/budgets.toml")


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.getoption("numprocesses", None):
        interpret_kernels()
    if not is_worker:  # a worker's reports come here
        config.pluginmanager.register(Seconds(config.getoption("--hold-budgets"), config.getoption("--write-budgets")))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """True for files without a test in `make test`: a third of all, which every worker would import."""
    return True if config.option.markexpr == MAKE_TEST and is_left_out(collection_path) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    if tier_of(item.keywords, file_of(item.nodeid)) == LAB:
        item.add_marker(LAB)


@pytest.hookimpl(trylast=True)  # what was not asked for is gone by then
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files = [file_of(item.nodeid) for item in items]
    parts = [Part(tier_of(item.keywords, file), file) for item, file in zip(items, files)]
    place = {file: index for index, file in enumerate(order(parts, read_budgets()))}
    items.sort(key=lambda item: place[file_of(item.nodeid)])


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Keeps the collection of tests out of all garbage collections that follow, half a second each."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # Triton's binding would complain of what it believes to be lost


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    config.option.loadscopereorder = False
    return ByScope(config, log)
