"""Device residency: what actor and engine keep on the device in each phase.

    mode             the actor                             the engine                       weights reach the engine
    split            on the device; gradient buffers and   awake except between roll-out    when they are published
                     optimizer state are off it while      and publishing
                     the engine is awake
    one step off     on the device                         always awake                     when they are published
    apart            on a device of its own                always awake, on another         when they are published
    shared           on the device in its agent's turns:   awake in its agent's turns,      when it wakes
                     to score, learn, hand out weights     after the actor is offloaded

The same kernels compute from the same numbers in every mode, so no bit depends on it.

Elsewhere: how a tensor is offloaded (megatron/train/offload.py), what is computed in a turn (agent.py).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from hacpo_mega.agent.weight_sync import WeightSync
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.turns import in_turn
from hacpo_mega.config.tables.schema import Mode
from hacpo_mega.logbook.steps.step_metrics import held_bytes
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.megatron.train.offload import Offload
from hacpo_mega.megatron.train.optimizer import ActorOffload
from hacpo_mega.rollout.engine import Engine


@dataclass(frozen=True)
class DevicePolicy:
    """A row of the table above.

    offloads_state   gradient buffers and optimizer state leave the device while the engine is awake, as far as the
                     actor offloads them
    engine_sleeps    the engine sleeps while the actor learns
    takes_turns      the job's agents take turns on the device; actor and engine are off it between them
    """

    offloads_state: bool = False
    engine_sleeps: bool = False
    takes_turns: bool = False


POLICIES = {
    "split": DevicePolicy(offloads_state=True, engine_sleeps=True),
    "one step off": DevicePolicy(),
    "apart": DevicePolicy(),
    "shared": DevicePolicy(offloads_state=True, engine_sleeps=True, takes_turns=True),
}


def device_policy(mode: Mode) -> DevicePolicy:
    """The row of `mode`; one step off changes nothing where engines have devices of their own."""
    return POLICIES["one step off" if mode.one_step_off and mode.placement == "split" else mode.placement]


class Devices:
    """Devices of one agent. Every rank of a cell calls every method.

    Where agents take turns every method but `publish` is collective over the job. Outside its turns an agent keeps
    nothing on the device but what a process cannot free (memory/budget.py). After an error in a turn this holds too,
    unless offloading also fails: then at most one of actor and engine stays.

    asleep_bytes   bytes in use on this rank's device after the engine's last sleep; None before the first sleep
    """

    def __init__(
        self,
        policy: DevicePolicy,
        place: Place,
        actor: Actor | None,
        actor_offload: ActorOffload | None,
        engine: Engine | None,
        weight_sync: WeightSync,
    ) -> None:
        """`engine` has just started with random weights; the actor has not learnt since it was loaded.

        Where agents take turns, `actor_offload` has offloaded the actor, and the engine sleeps afterwards.
        """
        self._policy, self._place, self._engine, self._weight_sync = policy, place, engine, weight_sync
        self._state = actor.optimizer.offload if policy.offloads_state else Offload(())
        self._offload, self._step, self._sleeps_for_export = actor_offload, 0, False
        self.asleep_bytes: int | None = None
        if policy.takes_turns:
            engine.sleep()

    def publish(self, step: int) -> None:
        """Syncs the actor's weights after `step` to the engine, which is awake afterwards.

        Optimizer state is offloaded meanwhile, and gradient buffers are freed, before the KV cache takes their place.
        Where agents take turns only the step is recorded: the weights are synced when the engine next wakes, in a turn
        with the actor onloaded.
        """
        if self._policy.takes_turns:
            self._step = step
            return
        is_asleep, self._sleeps_for_export = self._policy.engine_sleeps and self._engine.is_asleep, False
        self._state.begin_offload()
        if is_asleep:
            self._engine.wake(cache=False)  # weights first: the cache takes the memory of buffers that are freed below
        self._weight_sync.publish(step)
        self._state.finish_offload()
        if is_asleep:
            self._engine.wake()

    @contextmanager
    def answering(self, *, then_learns: bool = False) -> Iterator[None]:
        """Context of a generation call: the engine is awake with the published weights.

        `then_learns`: the call is the last before the actor learns; gradient buffers and optimizer state are onloaded
        after it, also after an error.
        """
        if self._policy.takes_turns:
            with self.scoring():
                with self._engine_in_turn():
                    self._offload.offload()  # before the cache takes its place
                    self._engine.wake()
                    yield
                self.asleep_bytes = held_bytes()
            return
        if self._sleeps_for_export:
            self.publish(self._weight_sync.step)
        try:
            yield
        finally:
            if then_learns and self._policy.engine_sleeps:
                self._engine.sleep()
                self.asleep_bytes = held_bytes()
                self._state.begin_onload()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Context in which the actor is on the device, to compute without learning or to give its weights."""
        if not self._policy.takes_turns:
            yield
            return
        with self._turn(to_learn=False), self._place.spans.span("turn"):
            yield

    def exporting(self) -> AbstractContextManager[None]:
        """`scoring` with the engine asleep, which then sleeps until it next answers.

        An export holds the model's largest matrices whole, twice, on every rank (megatron/weights/reshard.py): 28 GiB
        for a layer of DeepSeek-V3's experts. No phase of the budget has room for them beside an engine.
        """
        if self._policy.engine_sleeps and not self._engine.is_asleep:
            self._engine.sleep()
            self._sleeps_for_export = True
        return self.scoring()

    @contextmanager
    def learning(self, phase: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
        """Context of the updates of a step, in one turn.

        Waiting for this turn and later ones counts in the trainer's phase learn.
        """
        if not self._policy.takes_turns:
            yield
            return
        with ExitStack() as turn:
            with phase("learn"):
                turn.enter_context(self._turn(to_learn=True))
            with self._place.spans.span("turn"):  # a span may hold phases, but not cross the end of one
                yield
            with phase("learn"):
                turn.close()

    def differences(self) -> list[str]:
        """`WeightSync.differences`; where agents take turns, in one, right after a sync from the actor."""
        if not self._policy.takes_turns:
            return self._weight_sync.differences()
        with self.scoring(), self._engine_in_turn():
            return self._weight_sync.differences()

    def _turn(self, *, to_learn: bool) -> AbstractContextManager[None]:
        return in_turn(self._place, True, partial(self._offload.onload, to_learn=to_learn), self._offload.offload)

    @contextmanager
    def _engine_in_turn(self) -> Iterator[None]:
        """Context in which the engine has synced weights; on exit it and the actor are off the device, always."""
        try:
            self._engine.wake(cache=False)
            self._weight_sync.publish(self._step)
            yield
        finally:
            try:
                self._offload.offload()
            finally:
                if not self._engine.is_asleep:
                    self._engine.sleep()
