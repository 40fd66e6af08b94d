"""The answers of an evaluation on disk, to resume it and to trace every number.

    settings.json                          what was asked of whom; another evaluation never continues here
    answers/<benchmark>.lane_0000.jsonl    one line per answer, appended as they come, one file per engine
A line is an `Answer`. A process that is killed leaves at most a line without its end, which is dropped at the next
start. Elsewhere: statistics (table.py).
"""

import glob
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hacpo_mega.logbook.files.json_lines import COUNT, NUMBER, TEXT, as_line, checked
from hacpo_mega.logbook.run.run_lock import RunLock
from hacpo_mega.models.files.documents import json_file, parse_json
from hacpo_mega.models.files.links import require_inside, require_inside_its_run
from hacpo_mega.models.files.replacing import replace_file

SETTINGS = "settings.json"
CORRECT, NO_ANSWER = "correct", "no_answer"  # the verdicts on a success, and where there is nothing to judge
FIELDS = {
    **dict.fromkeys(("id", "prompt_seen", "gold", "text", "verdict", "stop"), TEXT),
    **dict.fromkeys(("rollout", "num_tokens"), COUNT),
    **{"vote": TEXT.or_null, "reward": NUMBER.or_null},
}


@dataclass(frozen=True)
class Answer:
    """One judged answer.

    id, rollout   the problem, and which of its answers this is       seed          of the sampler
    prompt_seen   what the model read, with template and special tokens   text      what it wrote, cut at a stop text
    vote          the final answer in `text`, None without one        reward        None when unjudged
    stop          eos, length or abort                                num_tokens    drawn, with the final EOS
    """

    id: str
    rollout: int
    seed: int
    prompt_seen: str
    gold: str
    text: str
    vote: str | None
    verdict: str
    reward: float | None
    stop: str
    num_tokens: int

    @property
    def is_judged(self) -> bool:
        return self.reward is not None

    @property
    def is_success(self) -> bool:
        return self.verdict == CORRECT


Key = tuple[str, int]


class AnswerFile:
    """The file of one engine for one benchmark, open for appending."""

    def __init__(self, folder: Path, benchmark: str, lane: int) -> None:
        """Drops a half-written last line, which a killed process may have left."""
        path = folder / "answers" / f"{benchmark}.lane_{lane:04d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._file.seek(0)
        written = self._file.read()
        self._file.truncate(written.rfind(b"\n") + 1)

    def append(self, answers: Iterable[Answer]) -> None:
        """Writes answers; they are in the file when this returns."""
        self._file.write(b"".join(as_line(asdict(answer)) for answer in answers))
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_answers(folder: Path, benchmark: str) -> dict[Key, Answer]:
    """The complete lines of all engines by (problem, rollout), a judged one before another. ValueError for a line that
    is no answer."""
    answers = {}
    for path in sorted((folder / "answers").glob(f"{glob.escape(benchmark)}.lane_[0-9]*.jsonl")):
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
            try:
                answer = Answer(**checked(parse_json(line), FIELDS))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not an answer of an evaluation: {error}") from error
            if answer.is_judged or (answer.id, answer.rollout) not in answers:
                answers[answer.id, answer.rollout] = answer
    return answers


def claim(folder: Path, settings: Mapping[str, Any]) -> RunLock:
    """Prepares the folder of this evaluation, by one process of the job. Its content has been checked.

    ValueError where another evaluation writes it.
    """
    lock = RunLock(folder, "--out")
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / SETTINGS, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    lock.enter()
    return lock


def require_place(folder: Path) -> None:
    """ValueError if a folder holds anything but an evaluation, or belongs to a run with a link out of it."""
    require_inside_its_run(folder)
    require_inside(folder, folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give a new folder")
    if folder.exists() and not (folder / SETTINGS).is_file() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no evaluation: give a new folder")


def check_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """ValueError if a folder holds anything but an evaluation of these settings, naming the difference."""
    path = folder / SETTINGS
    require_place(folder)
    if not path.is_file():
        return
    stored, asked = json_file(path), json.loads(json.dumps(settings))
    if not isinstance(stored, dict):
        raise ValueError(f"{path}: not the settings of an evaluation; give a new folder")
    # A model is what its weights are, wherever the folder lies.
    keys = (stored.keys() | asked.keys()) - {"model"}
    differing = sorted(key for key in keys if stored.get(key) != asked.get(key))
    if differing:
        lines = [f"  {key}: there {_short(stored.get(key))}, asked {_short(asked.get(key))}" for key in differing]
        raise ValueError(
            f"{folder} holds an evaluation with other settings; continue it with the same ones, or give a new folder:\n"
            + "\n".join(lines)
        )


def begun_at(folder: Path) -> str | None:
    """The fixed time of the chat template in a folder's evaluation, if any."""
    try:
        time = json_file(folder / SETTINGS)["prompting"]["time"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return time if isinstance(time, str) else None


def finite(value: float) -> float | None:
    """A number as JSON knows it: None for NaN."""
    return None if math.isnan(value) else value


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
