"""Who of an agent is on its devices when: the actor, the engine, and among agents that share devices, which agent.

    placement   the actor                              the engine                       weights reach the engine
    split       always there; its optimizer's state    awake but between roll-out and   when they are published
                is away while the engine is awake      publishing
    the same,   always there                           always awake                     when they are published
    one step off
    apart       always there, beside ranks that only answer, with an engine that is always awake
    shared      there in its agent's turns, to score,  awake in its agent's turns,      when it wakes
                to learn, to hand out its weights      when the actor has left

Under both the same numbers meet the same kernels, so that no bit depends on it.
Not here: how a tensor leaves (megatron/train/offload.py), what is computed in a turn (agent.py).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

from hacpo_mega.agent.publication import Publication
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.turns import in_turn
from hacpo_mega.logbook.steps.step_metrics import held_bytes
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.megatron.train.actor_offload import ActorOffload
from hacpo_mega.rollout.engine import Engine


class OwnDevices:
    """Of an agent that has its devices to itself. Every rank of a cell calls every method; `turn`s are the job's.

    asleep_bytes   what was not free on this rank's device when its engine had last fallen asleep; None: it never has
    """

    def __init__(self, place: Place, actor: Actor, engine: Engine, publication: Publication) -> None:
        """`engine` is as it started, on random weights, and `actor` as it was when the engine did."""
        self._place, self._engine, self._publication = place, engine, publication
        self._state = actor.optimizer.offload
        self._engine_sleeps = False
        self.asleep_bytes: int | None = None

    def publish(self, step: int) -> None:
        """Lets the engine answer with the actor's weights, those after `step`, from now on; it is awake afterwards.

        The optimizer's state leaves beside that, before the cache takes its place.
        """
        self._state.start_leaving()
        if self._engine_sleeps:
            self._engine.wake(cache=False)  # weights first: the cache comes back when nothing is in flight any more
        self._publication.publish(step)
        self._state.finish_leaving()
        if self._engine_sleeps:
            self._engine.wake()
        self._engine_sleeps = False

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around what the engine does, awake with the published weights."""
        yield

    @contextmanager
    def rolling_out(self) -> Iterator[None]:
        """The same, for the last time before the actor scores and learns; the optimizer's state comes back then."""
        yield
        self._engine.sleep()
        self._engine_sleeps = True
        self.asleep_bytes = held_bytes()
        self._state.start_returning()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Around what the actor does without learning: it computes, or gives its weights away."""
        yield

    @contextmanager
    def learning(self, _phase: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
        """Around the updates of a step. `_phase` is the trainer's, under which a wait for this is counted."""
        yield

    def differences(self) -> list[str]:
        """`Publication.differences`."""
        return self._publication.differences()


class BusyDevices(OwnDevices):
    """Of an agent that has its devices to itself, and whose engine answers while the actor learns: it never sleeps."""

    rolling_out = OwnDevices.answering


class ApartDevices(BusyDevices):
    """Of a rank that trains or answers, and never both: nothing leaves its device."""

    def __init__(self, _place: Place, _actor: Actor | None, _engine: Engine | None, publication: Publication) -> None:
        self._publication, self.asleep_bytes = publication, None

    def publish(self, step: int) -> None:
        """Gives the weights after `step`, or takes them."""
        self._publication.publish(step)


class SharedDevices(OwnDevices):
    """Of an agent that takes turns with the others of the job; every method but `publish` is collective over the job.

    Outside its turns nothing of it is on the device but what a process cannot give back (memory/budget.py); nor after
    an error in one, and where leaving fails, too, then not both of actor and engine.
    """

    def __init__(
        self, place: Place, actor: Actor, away: ActorOffload, engine: Engine, publication: Publication
    ) -> None:
        """The same in the agent's turn, with `actor` away; then both have left the device."""
        super().__init__(place, actor, engine, publication)
        self._away, self._step = away, 0
        engine.sleep()

    def publish(self, step: int) -> None:
        """Notes the step: the engine takes the weights when it wakes, in a turn, for which the actor comes."""
        self._step = step

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around what the engine does, awake with the actor's weights, in a turn."""
        with self.scoring():
            with self._handed_over():
                self._away.leave()  # before the cache takes its place
                self._engine.wake()
                yield
            self.asleep_bytes = held_bytes()

    rolling_out = answering

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Around what the actor does without learning, in a turn."""
        with self._turn(to_learn=False), self._place.spans.span("turn"):
            yield

    @contextmanager
    def learning(self, phase: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
        """Around the updates of a step, in one turn. The wait for it and for those after it are of the phase learn."""
        with ExitStack() as turn:
            with phase("learn"):
                turn.enter_context(self._turn(to_learn=True))
            with self._place.spans.span("turn"):  # around phases, and never across the end of one
                yield
            with phase("learn"):
                turn.close()

    def differences(self) -> list[str]:
        """`Publication.differences` in a turn: of the weights that it has just been given, from those of the actor."""
        with self.scoring(), self._handed_over():
            return super().differences()

    def _turn(self, *, to_learn: bool) -> AbstractContextManager[None]:
        return in_turn(self._place, True, partial(self._away.come, to_learn=to_learn), self._away.leave)

    @contextmanager
    def _handed_over(self) -> Iterator[None]:
        """With the actor's weights in the engine, beside the actor; left, both are away, whatever has failed."""
        try:
            self._engine.wake(cache=False)
            self._publication.publish(self._step)
            yield
        finally:
            try:
                self._away.leave()
            finally:
                if not self._engine.is_asleep:
                    self._engine.sleep()
