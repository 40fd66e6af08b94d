"""Public mathematics data in the layouts it is published in -> one schema, `Problem`.

    container   JSON Lines (.jsonl, .txt, .json), one JSON object or list per file (.json), Parquet, a .tar.gz or a
                folder tree of JSON files (the classic MATH/<split>/<subject>/<n>.json)
    layout      recognised by the fields of a row, see LAYOUTS: MATH, MATH-500, GSM8K, AIME, AMC, Minerva,
                OlympiadBench, verl's RLHFDataset, plain prompt/answer
A row that fits no layout, has no gold answer, or is of another layout than the rest of its file is a DataProblem with
its line; the good rows still come. Not here: repeated and overlapping problems (dataset_checks.py).
"""

import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hacpo_mega.data.answer_text import gold_answer, last_boxed
from hacpo_mega.data.files import DataProblem, PromptRow, content_id, gold_text, read_records

Record = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """A problem in the one schema; empty where the source says nothing.

    id         the first 16 hex digits of sha256 of `prompt`: the same problem has it in every file
    prompt     the text a model is given        gold      the gold answer alone, as LaTeX or plain text
    solution   the reference solution           level, subject   as the source writes them
    source     file name, and the row's own id where it has one      line   in its file, from 1
    """

    id: str
    prompt: str
    gold: str
    solution: str = ""
    level: str = ""
    subject: str = ""
    source: str = ""
    line: int = 0

    @property
    def row(self) -> PromptRow:
        return PromptRow(self.id, self.prompt, self.gold)


@dataclass(frozen=True)
class Dataset:
    """What a file or folder holds: its problems, in order, what could not be read, and the layout of its rows."""

    path: Path
    layout: str
    problems: tuple[Problem, ...]
    defects: tuple[DataProblem, ...]


@dataclass(frozen=True)
class Layout:
    """How one kind of row is recognised and where its problem, gold answer and solution are.

    The extractors raise KeyError, TypeError or ValueError on a row that is not what it looks like.
    """

    matches: Callable[[Record], bool]
    prompt: Callable[[Record], str]
    answer: Callable[[Record], str]
    solution: Callable[[Record], str] = lambda row: ""


def _field(name: str) -> Callable[[Record], str]:
    return lambda row: row[name]


def _has(*names: str) -> Callable[[Record], bool]:
    return lambda row: all(row.get(name) is not None for name in names)


def _boxed_solution(row: Record) -> str:
    answer = last_boxed(row["solution"])
    if answer is None:
        raise ValueError("has no complete \\boxed{} to take the answer from")
    return answer


def _competition_answer(row: Record) -> str:
    """AMC writes 27.0 and AIME 025 for whole numbers; every other answer stays as it is."""
    text = gold_text(row["answer"])
    return str(int(text)) if text.isascii() and text.isdigit() else text


def _last_message(row: Record) -> str:
    roles = [message["role"] for message in row["prompt"]]
    if roles != ["user"]:
        raise ValueError(f"has messages of {', '.join(roles)}; needs a single one of user")
    return row["prompt"][0]["content"]


def _verl_target(row: Record) -> str:
    truth = row["reward_model"]["ground_truth"]
    return gold_text(truth["target"] if isinstance(truth, dict) else truth)


def _verl_solution(row: Record) -> str:
    truth = row["reward_model"]["ground_truth"]
    return truth.get("solution", "") if isinstance(truth, dict) else ""


def _with_context(row: Record) -> str:
    return f"{row['context']}\n\n{row['question']}" if row.get("context") else row["question"]


def _single_answer(row: Record) -> str:
    if len(row["final_answer"]) != 1:
        raise ValueError(f"has {len(row['final_answer'])} final answers; needs one string with all of them")
    return row["final_answer"][0]


def _olympiad_solution(row: Record) -> str:
    found = row.get("solution") or ""
    return "\n\n".join(found) if isinstance(found, list) else found


LAYOUTS: Mapping[str, Layout] = {
    "verl": Layout(
        lambda row: isinstance(row.get("prompt"), list) and "reward_model" in row,
        _last_message,
        _verl_target,
        _verl_solution,
    ),
    "olympiadbench": Layout(_has("question", "final_answer"), _with_context, _single_answer, _olympiad_solution),
    "nemo": Layout(
        _has("problem", "expected_answer"),
        _field("problem"),
        lambda row: gold_text(row["expected_answer"]),
        lambda row: row.get("reference_solution") or "",
    ),
    "gsm8k": Layout(
        lambda row: "####" in str(row.get("answer")) and "question" in row,
        _field("question"),
        lambda row: gold_answer(row["answer"]).replace(",", ""),
        _field("answer"),
    ),
    "answered": Layout(
        _has("problem", "answer"), _field("problem"), _competition_answer, lambda row: row.get("solution") or ""
    ),
    "math": Layout(_has("problem", "solution"), _field("problem"), _boxed_solution, _field("solution")),
    "plain": Layout(
        lambda row: isinstance(row.get("prompt"), str) and row.get("answer") is not None,
        _field("prompt"),
        lambda row: gold_text(row["answer"]),
        lambda row: row.get("solution") or "",
    ),
    "question": Layout(_has("question", "answer"), _field("question"), lambda row: gold_text(row["answer"])),
}


def read_dataset(path: Path) -> Dataset:
    """The problems of a file, archive or folder in any layout; whatever is wrong with it comes as defects."""
    problems, defects = [], []
    layout_of_file = ""
    for line, name, record in _records(Path(path)):
        if isinstance(record, DataProblem):
            defects.append(record)
            continue
        layout = next((name for name, layout in LAYOUTS.items() if layout.matches(record)), None)
        layout_of_file = layout_of_file or layout or ""
        if layout is None:
            defects.append(
                DataProblem(Path(path), line, None, f"fits no known layout (the row has: {_fields(record)})")
            )
        elif layout != layout_of_file:
            what = f"is a row of layout {layout!r} in a file of {layout_of_file!r}"
            defects.append(DataProblem(Path(path), line, None, what))
        else:
            found = _problem(Path(path), line, name, record, LAYOUTS[layout])
            (problems if isinstance(found, Problem) else defects).append(found)
    if not problems and not defects:
        defects.append(DataProblem(Path(path), None, None, "has no rows"))
    return Dataset(Path(path), layout_of_file, tuple(problems), tuple(defects))


def _fields(record: Record) -> str:
    return ", ".join(sorted(record)) or "no field at all"


def _problem(path: Path, line: int, name: str, record: Record, layout: Layout) -> Problem | DataProblem:
    try:
        prompt, answer, solution = layout.prompt(record), layout.answer(record), layout.solution(record)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        what = str(error) if isinstance(error, ValueError) else f"is malformed ({type(error).__name__}: {error})"
        return DataProblem(path, line, None, what)
    for field, text in (("prompt", prompt), ("answer", answer)):
        if not isinstance(text, str) or not text.strip():
            return DataProblem(path, line, field, "is empty" if text == "" else f"is {text!r}, needs text")
    own_id = record.get("unique_id", record.get("id", record.get("idx")))
    return Problem(
        id=content_id(prompt),
        prompt=prompt,
        gold=answer.strip(),
        solution=solution if isinstance(solution, str) else "",
        level=str(record.get("level") or ""),
        subject=str(record.get("type") or record.get("subject") or record.get("subfield") or ""),
        source=name if own_id is None else f"{name}#{own_id}",
        line=line,
    )


def write_dataset(problems: Iterable[Problem], file: Path) -> None:
    """Writes JSON Lines in the schema of `Problem`, the gold as `answer`: data.files of a run reads it as it is."""
    rows = ({"answer" if key == "gold" else key: value for key, value in asdict(p).items()} for p in problems)
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _records(path: Path) -> Iterator[tuple[int, str, Record | DataProblem]]:
    """(line or number of the file, name, record) of every row of a file, an archive or a folder."""
    if path.is_dir():
        files = sorted(path.rglob("*.json"))
        for number, file in enumerate(files, start=1):
            yield from _json_documents(file, number, str(file.relative_to(path)), file.read_bytes())
    elif path.name.endswith((".tar.gz", ".tgz", ".tar")):
        yield from _archive(path)
    elif path.suffix == ".json" and path.is_file() and not _is_json_lines(path):
        yield from _json_documents(path, 1, path.name, path.read_bytes())
    else:
        yield from ((line, path.name, record) for line, record in read_records(path))


def _is_json_lines(path: Path) -> bool:
    with path.open("rb") as lines:
        first = lines.readline()
        try:
            return isinstance(json.loads(first), dict) and bool(lines.readline().strip())
        except ValueError:
            return False


def _archive(path: Path) -> Iterator[tuple[int, str, Record | DataProblem]]:
    number = 0
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and member.name.endswith(".json"):
                    number += 1
                    yield from _json_documents(path, number, member.name, archive.extractfile(member).read())
    except (tarfile.TarError, EOFError, OSError) as error:
        yield number + 1, path.name, DataProblem(path, number + 1, None, f"unreadable archive: {error}")


def _json_documents(path: Path, number: int, name: str, raw: bytes) -> Iterator[tuple[int, str, Record | DataProblem]]:
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        yield number, name, DataProblem(path, number, None, f"{name}: invalid JSON: {error}")
        return
    for i, record in enumerate(content if isinstance(content, list) else [content]):
        line = number + i
        if isinstance(record, dict):
            yield line, name, record
        else:
            yield (
                line,
                name,
                DataProblem(path, line, None, f"{name}: is a JSON {type(record).__name__}, needs an object"),
            )
