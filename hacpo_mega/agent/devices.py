"""Device residency: which of actor, engine and other agents occupies the device in each phase.

    placement   the actor                              the engine                       weights reach the engine
    split       always on the device; its optimizer    awake except between roll-out    when they are published
                state is offloaded while the engine    and publishing
                is awake
    the same,   always on the device                   always awake                     when they are published
    one step off
    apart       always on the device, beside ranks that only generate, whose engine is always awake
    shared      on the device in its agent's turns:    awake in its agent's turns,      when it wakes
                to score, learn, hand out weights      after the actor is offloaded

The same numbers meet the same kernels under every placement, so no bit depends on it.

Not here: how a tensor is offloaded (megatron/train/offload.py), what is computed in a turn (agent.py).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

from hacpo_mega.agent.weight_sync import WeightSync
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.turns import in_turn
from hacpo_mega.logbook.steps.step_metrics import held_bytes
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.megatron.train.optimizer import ActorOffload
from hacpo_mega.rollout.engine import Engine


class OwnDevices:
    """Devices of an agent that shares them with no other. Every rank of a cell calls every method.

    asleep_bytes   bytes in use on this rank's device after the engine's last sleep; None before the first sleep
    """

    def __init__(self, place: Place, actor: Actor, engine: Engine, weight_sync: WeightSync) -> None:
        """`engine` has just started with random weights; `actor` is in the state in which it was then."""
        self._place, self._engine, self._weight_sync = place, engine, weight_sync
        self._state = actor.optimizer.offload
        self._engine_sleeps = False
        self.asleep_bytes: int | None = None

    def publish(self, step: int) -> None:
        """Syncs the actor's weights after `step` to the engine, which is awake afterwards.

        The optimizer state is offloaded meanwhile, before the KV cache takes its place.
        """
        self._state.begin_offload()
        if self._engine_sleeps:
            self._engine.wake(cache=False)  # weights first: the cache comes back when nothing is in flight any more
        self._weight_sync.publish(step)
        self._state.finish_offload()
        if self._engine_sleeps:
            self._engine.wake()
        self._engine_sleeps = False

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Context of a generation call: the engine is awake with the published weights."""
        yield

    @contextmanager
    def rolling_out(self) -> Iterator[None]:
        """Context of the last generation call before the actor learns; the optimizer state is onloaded after it."""
        yield
        self._engine.sleep()
        self._engine_sleeps = True
        self.asleep_bytes = held_bytes()
        self._state.begin_onload()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Context in which the actor computes without learning, or hands out its weights."""
        yield

    @contextmanager
    def learning(self, _phase: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
        """Context of the updates of a step. A wait for this is counted under the trainer's `_phase`."""
        yield

    def differences(self) -> list[str]:
        """Forwards `WeightSync.differences`."""
        return self._weight_sync.differences()


class BusyDevices(OwnDevices):
    """Devices of an agent whose engine generates while the actor learns: it never sleeps."""

    rolling_out = OwnDevices.answering


class ApartDevices(BusyDevices):
    """Devices of a rank that either trains or generates: nothing is offloaded."""

    def __init__(self, _place: Place, _actor: Actor | None, _engine: Engine | None, weight_sync: WeightSync) -> None:
        self._weight_sync, self.asleep_bytes = weight_sync, None

    def publish(self, step: int) -> None:
        """Sends or receives the weights after `step`."""
        self._weight_sync.publish(step)


class SharedDevices(OwnDevices):
    """Devices that the job's agents take turns on; every method but `publish` is collective over the job.

    Outside its turns an agent keeps nothing on the device but what a process cannot free (memory/budget.py). After an
    error in a turn this holds too, unless offloading also fails: then at most one of actor and engine stays.
    """

    def __init__(
        self, place: Place, actor: Actor, actor_offload: ActorOffload, engine: Engine, weight_sync: WeightSync
    ) -> None:
        """Takes over in the agent's turn, with `actor` offloaded; afterwards the engine is asleep, too."""
        super().__init__(place, actor, engine, weight_sync)
        self._offload, self._step = actor_offload, 0
        engine.sleep()

    def publish(self, step: int) -> None:
        """Notes the step: the engine takes the weights when it next wakes, in a turn with the actor onloaded."""
        self._step = step

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Context of a generation call in a turn: the engine is awake with the actor's weights."""
        with self.scoring():
            with self._handed_over():
                self._offload.offload()  # before the cache takes its place
                self._engine.wake()
                yield
            self.asleep_bytes = held_bytes()

    rolling_out = answering

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Context, in a turn, in which the actor computes without learning."""
        with self._turn(to_learn=False), self._place.spans.span("turn"):
            yield

    @contextmanager
    def learning(self, phase: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
        """Context of the updates of a step, in one turn.

        Waits for this turn and later ones count in the phase learn.
        """
        with ExitStack() as turn:
            with phase("learn"):
                turn.enter_context(self._turn(to_learn=True))
            with self._place.spans.span("turn"):  # around phases, and never across the end of one
                yield
            with phase("learn"):
                turn.close()

    def differences(self) -> list[str]:
        """`WeightSync.differences` in a turn: the weights just synced, against the actor's."""
        with self.scoring(), self._handed_over():
            return super().differences()

    def _turn(self, *, to_learn: bool) -> AbstractContextManager[None]:
        return in_turn(self._place, True, partial(self._offload.onload, to_learn=to_learn), self._offload.offload)

    @contextmanager
    def _handed_over(self) -> Iterator[None]:
        """Context in which the engine has the actor's weights; on exit both are off the device, also after an error."""
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
