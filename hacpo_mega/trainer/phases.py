"""Phases of a step: each is timed, shown, and named ("learn of step 3") in case this process dies in it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from hacpo_mega.cluster.place import Place
from hacpo_mega.logbook.files.metrics import Metrics
from hacpo_mega.logbook.steps.step_metrics import held_bytes

# Function from the name of a phase to a further context around it.
Around = Callable[[str], AbstractContextManager[None]]


class Phases:
    """Context of a phase: called with its name.

    step   the current one, from 1
    """

    def __init__(self, place: Place, metrics: Metrics, around: Sequence[Around] = ()) -> None:
        self._place, self._metrics, self._around = place, metrics, tuple(around)
        self.step = 1

    @contextmanager
    def __call__(self, phase: str, when: str = "") -> Iterator[None]:
        """Enters the phase; `when` replaces the step in its label. Records the memory held at its end."""
        self._place.enter_phase(phase, when or f"of step {self.step}")
        with ExitStack() as stack:
            for around in self._around:
                stack.enter_context(around(phase))
            stack.enter_context(self._metrics.time(phase))
            stack.enter_context(self._place.spans.span(phase, "phase"))
            stack.callback(self._place.leave_phase)
            yield
        self._metrics.highest(f"agent/{self._place.coordinate.agent_name}/memory/{phase}_bytes", held_bytes())
