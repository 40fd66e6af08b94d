"""Tenants of a shared device after an error in a turn: every call that an agent makes there fails once, then two do.

`visit` runs inside cuda_engine_job.py. Actor and engine note whether they are there, and fail before and after it.
`split_steps` notes what an agent with a device of its own holds on it meanwhile.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import combinations
from types import SimpleNamespace

import torch

from hacpo_mega.agent.devices import POLICIES, Devices
from hacpo_mega.megatron.train.offload import Offload


class Faults:
    """The points at which a call can raise, numbered as they are passed; those of `failing` do."""

    def __init__(self, failing: tuple[int, ...] = (), kind: type[BaseException] = RuntimeError) -> None:
        self.failing, self.kind, self.passed = failing, kind, 0

    def point(self, name: str) -> None:
        self.passed += 1
        if self.passed in self.failing:
            raise self.kind(name)


class Tenant:
    """The actor as it comes and leaves, and the engine as it wakes and sleeps."""

    def __init__(self, faults: Faults) -> None:
        self.faults, self.is_asleep, self.quantizes, self.step = faults, False, False, 1

    def to(self, name: str, is_asleep: bool) -> None:
        self.faults.point(f"before {name}")
        self.is_asleep = is_asleep
        self.faults.point(f"after {name}")

    def wake(self, *, cache: bool = True) -> None:
        assert self.is_asleep or cache
        self.to("wake", False)

    def sleep(self) -> None:
        assert not self.is_asleep
        self.to("sleep", True)

    def onload(self, *, to_learn: bool) -> None:
        self.to("onload", False)

    def offload(self) -> None:
        self.to("offload", True)

    def publish(self, _step: int) -> None:
        self.faults.point("publish")

    def differences(self) -> list[str]:
        self.faults.point("differences")
        return []


def turn(phase: str, faults: Faults) -> tuple[Tenant, Tenant]:
    """Actor and engine after one `phase` of an agent, and an error if it had one."""
    silent = Faults()
    actor, engine = Tenant(silent), Tenant(silent)
    actor.is_asleep = True
    place = SimpleNamespace(
        agent=0,
        rank_map=SimpleNamespace(agents=(0, 1)),
        barrier=lambda: faults.point("barrier"),
        spans=SimpleNamespace(span=lambda _name: nullcontext()),
    )
    optimizer = SimpleNamespace(offload=None)
    devices = Devices(POLICIES["shared"], place, SimpleNamespace(optimizer=optimizer), actor, engine, engine)
    actor.faults = engine.faults = faults

    @contextmanager
    def phases(name: str) -> Iterator[None]:
        faults.point(name)
        yield
        faults.point(name)

    try:
        if phase == "differences":
            devices.differences()
        elif phase == "publish":
            devices.publish(0)
        else:
            with {
                "learning": lambda: devices.learning(phases),
                "rolling_out": lambda: devices.answering(then_learns=True),
            }.get(phase, lambda: getattr(devices, phase)())():
                faults.point("inside")
                if phase in ("answering", "rolling_out"):
                    assert actor.is_asleep and not engine.is_asleep
                else:
                    assert engine.is_asleep and not actor.is_asleep
    except faults.kind:
        assert faults.failing
    return actor, engine


def visit() -> dict[str, object]:
    """Per phase: how many points it has, and the failures after which both were there."""
    found = {}
    for phase in ("answering", "rolling_out", "scoring", "learning", "differences", "publish"):
        count = Faults()
        turn(phase, count)
        both = []
        for kind in (RuntimeError, OSError, KeyboardInterrupt):
            # what comes while it is cleaned up passes points of its own
            failures = [(at,) for at in range(1, count.passed + 1)] + list(combinations(range(1, count.passed + 9), 2))
            for failing in failures:
                actor, engine = turn(phase, Faults(failing, kind))
                if not actor.is_asleep and not engine.is_asleep:
                    both.append((kind.__name__, failing))
        found[phase] = count.passed, both
    return found


def split_steps(policy: str, *, offloads: bool, fails: bool) -> list[tuple[str, int, int]]:
    """(call of the engine, bytes of gradients, bytes of state) of a start and a step; gradients are 40, state is 80.

    `fails`: generation raises the first time, and the agent learns from what it has.
    """
    state, gradients = torch.ones(20), torch.ones(10)
    homes, noted = (gradients.detach(), state.detach()), []
    offload = Offload([state] if offloads else [], scratch=[gradients] if policy == "split" else [])

    class Watched(Tenant):
        def to(self, name: str, is_asleep: bool) -> None:
            note(name)
            self.is_asleep = is_asleep

        def publish(self, _step: int) -> None:
            note("publish")

    def note(name: str) -> None:
        noted.append((name, *(home.untyped_storage().nbytes() for home in homes)))

    engine = Watched(Faults())
    offload.begin_offload()  # as an actor is built (agent.py)
    offload.finish_offload()
    actor = SimpleNamespace(optimizer=SimpleNamespace(offload=offload))
    devices = Devices(POLICIES[policy], None, actor, None, engine, engine)
    devices.publish(0)
    try:
        with devices.answering(then_learns=True):
            note("generate")
            if fails:
                raise RuntimeError("of the engine")
    except RuntimeError:
        assert fails
    offload.ensure_on_device()
    note("learn")
    assert state.tolist() == [1.0] * 20
    devices.publish(1)
    with devices.answering():
        note("evaluate")
    for _ in range(2):  # the first one may have found the disk full
        with devices.exporting():
            note("export")
    with devices.answering():
        note("evaluate")
    return noted
