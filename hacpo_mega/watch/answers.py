"""Queries for the answers of a run: a page of a selection, all data of one answer, a selection as JSON Lines.

A selection is a JSON object: values of `agent`, `skill`, `verdict`, `stop`, `turn`, `prompt_id`; ranges [low or null,
high or null] of `step`, `reward`, `length`, and of `ratio` and `advantage` for any learner; words of the `text`; a
`regex`. Words are looked up in the index. For a regular expression the answers are read from the run's own files,
newest first, for REGEX_S seconds at most. The key of an answer is "step.lane.prompt_index.agent.rollout".
"""

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import regex

from hacpo_grading.graders.registry import GRADERS
from hacpo_grading.judge import Judge
from hacpo_grading.judgement import Asked, Stop
from hacpo_mega.config import RewardConfig
from hacpo_mega.grading.run_judge import judge_of
from hacpo_mega.logbook.files.json_lines import MAX_COUNT, is_number
from hacpo_mega.logbook.files.rollout_log import logged_prompt, prompt_text
from hacpo_mega.models.files.documents import parse_json, short
from hacpo_mega.models.files.links import require_inside
from hacpo_mega.watch.index import Gone, Index, learner_columns, words_of

PER_PAGE = 50
REGEX_S, MOST_PATTERN = 0.8, 500
LEAST_PREFIX = 3  # letters that the last word of a search must have to match the beginnings of words, too
FREQUENT = 0.05  # share of the answers: a text that is in more of them is frequent
HITS = ("id IN (SELECT id FROM hit)", "+id IN (SELECT id FROM hit)")  # condition for a rare text, for a frequent one
WORDS = ("agent", "skill", "verdict", "stop")
RANGES = ("step", "reward", "length")
BY_LEARNER = ("ratio", "advantage")
FIELDS = {*WORDS, *RANGES, *BY_LEARNER, "turn", "prompt_id", "text", "regex"}
SORTS = {*WORDS, *RANGES, *BY_LEARNER, "turn"}


def page_of_answers(index: Index, selection: Mapping[str, Any], sort: str, page: int) -> dict[str, Any]:
    """A page of the selected answers, 0 the first, with their total. ValueError for a wrong selection."""
    with index.reading() as db:
        where, values = _condition(db, selection)
        order = _order(db, sort)
        choices = {kind: words_of(db, kind) for kind in WORDS}
        note = _unread_note(db)
        if pattern := selection.get("regex"):
            rows = f"SELECT id FROM answers WHERE {where} ORDER BY {order}"
            ids, total, cut = _regex_page(index, db, rows, values, _compiled_regex(pattern), page)
            note = cut or note
        else:
            total = db.execute(f"SELECT count(*) FROM {_counted_rows(db, where)}", values).fetchone()[0]
            rows = f"SELECT id FROM answers WHERE {where} ORDER BY {order} LIMIT {PER_PAGE} OFFSET ?"
            ids = [row[0] for row in db.execute(rows, [*values, page * PER_PAGE])]
        shown = [_list_row(db, number) for number in ids]
    found = {"total": total, "page": page, "per_page": PER_PAGE, "rows": shown, "choices": choices}
    return found | ({"note": note} if note else {})


class Judges(AbstractContextManager["Judges"]):
    """Explains recorded verdicts by judging an answer anew, with graders that come with the project. A context.

    Graders that a run's configuration brings are not executed here, and no server is asked: their verdicts have no
    explanation.
    """

    def __init__(self) -> None:
        self._judges: dict[str, Judge | None] = {}
        self._one_at_a_time, self._stack = threading.Lock(), ExitStack()

    def explain(self, reward: Any, line: Mapping[str, Any], answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """The grader's explanation of an answer to a logged prompt; empty where there is none."""
        with self._one_at_a_time, suppress(ValueError):
            judge = self._judge(reward)
            stop = next((stop for stop in Stop if stop.name.lower() == answer["stop"]), Stop.EOS)
            asked = Asked(prompt_text(line), answer["text"], line["gold"], stop, json.dumps(line.get("row") or {}))
            if judge is not None:
                return judge.judge_and_explain([asked])[0][1]
        return {}

    def _judge(self, reward: Any) -> Judge | None:
        """The judge of a run's [reward], made when its first answer comes; None if its grader must not run here."""
        name = repr(reward)
        if name not in self._judges:
            self._judges[name] = None
            given = RewardConfig.model_validate(reward or {})
            grader = None if given.parts or given.kind not in GRADERS else GRADERS[given.kind]
            if grader is not None and grader.explainer is not None and not grader.acts:
                judge = judge_of(given.model_copy(update={"num_workers": 1}))
                self._judges[name] = self._stack.enter_context(judge)
        return self._judges[name]

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def one_answer(index: Index, key: str, judges: Judges, reward: Any) -> dict[str, Any]:
    """All data of an answer, and of the others to its prompt. ValueError for an unknown key, Gone without its file.

    reward   the [reward] of the run's configuration, by which `judges` explains the verdict
    """
    with index.reading() as db:
        number = _answer_id(db, key)
        prompt, place = db.execute("SELECT prompt, place FROM answers WHERE id = ?", (number,)).fetchone()
        line = _logged_line(index, db, prompt)
        ids = db.execute("SELECT id, place FROM answers WHERE prompt = ? ORDER BY place", (prompt,)).fetchall()
        keys = {other: _list_row(db, other_id)["key"] for other_id, other in ids}
    shared = {
        **{name: line[name] for name in ("step", "lane", "skill", "gold", "prompt")},
        **{"prompt_id": line["id"], "row": line.get("row"), "tools": line.get("tools")},
    }
    described = {
        other: shared | _with_all_fields(line, answer) | {"key": keys[other]}
        for other, answer in enumerate(line["answers"])
        if other in keys
    }
    found, reasons = described.pop(place), judges.explain(reward, line, line["answers"][place])
    explanation = {name: value if isinstance(value, str | bool) else str(value) for name, value in reasons.items()}
    found["extracted"], found["rule"] = explanation.get("extracted", explanation.get("answer")), explanation.get("rule")
    return found | {"explanation": explanation, "others": list(described.values())}


def exported(index: Index, selection: Mapping[str, Any], sort: str) -> Iterator[bytes]:
    """The selected answers as JSON Lines with all fields; answers whose files are gone are left out."""
    pattern = _compiled_regex(selection["regex"]) if selection.get("regex") else None
    with index.reading() as db:
        where, values = _condition(db, selection)
        query = f"SELECT id, prompt, place FROM answers WHERE {where} ORDER BY {_order(db, sort)}"
        return _json_lines(index, db.execute(query, values).fetchall(), pattern)


def _json_lines(index: Index, rows: Sequence[tuple[int, int, int]], pattern: Any) -> Iterator[bytes]:
    with index.reading() as db:
        for _, line, answer in _logged_answers(index, db, rows):
            if answer is not None and (pattern is None or _is_match(pattern, answer["text"], REGEX_S)):
                row = {name: value for name, value in line.items() if name != "answers"} | answer
                yield json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _logged_answers(
    index: Index, db: sqlite3.Connection, rows: Iterable[tuple[int, int, int]]
) -> Iterator[tuple[int, Mapping[str, Any], Mapping[str, Any] | None]]:
    """Id, logged prompt and answer of rows (id, prompt, place); None as the answer where its file is gone."""
    read, line = None, {}
    for answer_id, prompt, place in rows:
        if prompt != read:
            read = prompt
            try:
                line = _logged_line(index, db, prompt)
            except Gone:
                line = {"answers": []}
        answers = line["answers"]
        yield answer_id, line, answers[place] if place < len(answers) else None


def _unread_note(db: sqlite3.Connection) -> str | None:
    row = db.execute("SELECT value FROM state WHERE key = 'unread'").fetchone()
    return f"{row[0]:,} files of answers are still to be read; the newest are here" if row and row[0] else None


def _counted_rows(db: sqlite3.Connection, where: str) -> str:
    """The FROM clause that counts a condition's rows.

    For a text only, its hits are counted already, unless answers were forgotten, whose words stay in the index.
    """
    newest, num_answers = db.execute("SELECT (SELECT max(id) FROM answers), (SELECT count(*) FROM answers)").fetchone()
    return "hit" if where in HITS and newest == num_answers else f"answers WHERE {where}"


def _condition(db: sqlite3.Connection, selection: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """The selection as a condition on the table of answers, with its values."""
    if unknown := selection.keys() - FIELDS:
        raise ValueError(f"no field {short(min(unknown))}: give some of {', '.join(sorted(FIELDS))}")
    parts, values = [], []
    for name, value in selection.items():
        if value in (None, "", [None, None]) or name == "regex":
            continue
        part, part_values = _one_condition(db, name, value)
        parts.append(part)
        values += part_values
    return " AND ".join(parts) or "1", values


def _one_condition(db: sqlite3.Connection, name: str, value: Any) -> tuple[str, list[Any]]:
    if name in (*RANGES, *BY_LEARNER):
        return _range(db, name, value)
    if name == "turn":
        if type(value) is not int or abs(value) > MAX_COUNT:
            raise ValueError(f"turn is {short(value)}, needs a whole number")
        return "turn = ?", [value]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {short(value)}, needs text")
    if name == "text":
        if not any(map(str.isalnum, value)):
            raise ValueError(f"text {short(value)} has no word: look for signs with regex")
        is_prefix = len(regex.split(r"\W+", value)[-1]) >= LEAST_PREFIX  # shorter ones are in nearly every answer
        phrase = '"' + value.replace('"', '""').replace("\0", " ") + ('" *' if is_prefix else '"')
        # A table, so that the total and the page look the words up once: those of a frequent text take long.
        db.execute("CREATE TEMP TABLE hit (id INTEGER PRIMARY KEY)")
        num_hits = db.execute("INSERT INTO hit SELECT rowid FROM texts WHERE texts MATCH ?", (phrase,)).rowcount
        num_answers = db.execute("SELECT max(id) FROM answers").fetchone()[0] or 0
        # For a frequent text `+` keeps SQLite from starting at the hits: it walks the answers in order, up to a page.
        return HITS[num_hits > FREQUENT * num_answers], []
    if name == "prompt_id":
        return "prompt IN (SELECT id FROM prompts WHERE prompt_id = ?)", [value]
    return f"{name} = (SELECT id FROM words WHERE kind = ? AND word = ?)", [name, value]


def _range(db: sqlite3.Connection, name: str, value: Any) -> tuple[str, list[Any]]:
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(end is None or is_number(end) for end in value):
        raise ValueError(f"{name} is {short(value)}, needs [low, high], each a number or null")
    columns = list(learner_columns(db, name).values()) if name in BY_LEARNER else [name]
    parts, values = [], []
    for column in columns:
        ends = [(f"{column} {sign} ?", end) for sign, end in zip((">=", "<="), value) if end is not None]
        parts.append(" AND ".join(part for part, _ in ends))
        values += [end for _, end in ends]
    return "(" + (" OR ".join(f"({part})" for part in parts) or "0") + ")", values


def _order(db: sqlite3.Connection, sort: str) -> str:
    """The ORDER BY clause; of ratios and advantages the largest of all learners counts. Absent values come last."""
    name = sort.removeprefix("-")
    if name not in SORTS:
        raise ValueError(f"no order by {short(name)}: give one of {', '.join(sorted(SORTS))}, with - for descending")
    direction = "DESC" if sort.startswith("-") else "ASC"
    if name == "step":
        return f"step {direction}, id"
    if name in BY_LEARNER:
        columns = [f"coalesce({column}, -9e99)" for column in learner_columns(db, name).values()] or ["0"]
        value = f"max({', '.join(columns)}, -9e99)"
    else:
        value = f"(SELECT word FROM words WHERE id = {name})" if name in WORDS else name
    return f"{value} {direction} NULLS LAST, id"


def _list_row(db: sqlite3.Connection, number: int) -> dict[str, Any]:
    """An answer as a list shows it."""
    columns = {field: learner_columns(db, field) for field in BY_LEARNER}
    names = [column for learners in columns.values() for column in learners.values()]
    word = "(SELECT word FROM words WHERE id = answers.{0}) AS {0}"
    query = (
        f"SELECT {', '.join([*map(word.format, WORDS), *names])}, answers.step, lane, prompt_index, prompt_id, "
        "rollout, reward, length, turn, text AS excerpt FROM answers JOIN prompts ON prompts.id = answers.prompt "
        "JOIN excerpts ON excerpts.id = answers.id WHERE answers.id = ?"
    )
    cursor = db.execute(query, (number,))
    row = dict(zip([column[0] for column in cursor.description], cursor.fetchone()))
    for field, learners in columns.items():
        known = {learner: row.pop(column) for learner, column in learners.items()}
        row[field] = {learner: value for learner, value in known.items() if value is not None}
    place = (row["step"], row.pop("lane"), row.pop("prompt_index"), row["agent"], row.pop("rollout"))
    return {"key": ".".join(map(str, place))} | row


def _answer_id(db: sqlite3.Connection, key: str) -> int:
    found = regex.fullmatch(r"(\d{1,15})\.(\d{1,15})\.(\d{1,15})\.(.+)\.(\d{1,15})", key, regex.DOTALL)
    query = (
        "SELECT answers.id FROM answers JOIN prompts ON prompts.id = answers.prompt WHERE answers.step = ? "
        "AND lane = ? AND prompt_index = ? AND rollout = ? "
        "AND agent = (SELECT id FROM words WHERE kind = 'agent' AND word = ?)"
    )
    row = None
    if found is not None:
        step, lane, prompt_index, agent, rollout = found.groups()
        row = db.execute(query, (*map(int, (step, lane, prompt_index, rollout)), agent)).fetchone()
    if not row:
        raise ValueError(f"no answer {short(key)}: its step was replaced when the run resumed, or is not read yet")
    return row[0]


def _logged_line(index: Index, db: sqlite3.Connection, prompt: int) -> dict[str, Any]:
    """A logged prompt, from the run's file. Gone where the file no longer has it."""
    query = "SELECT name, start, prompts.size FROM prompts JOIN parts ON parts.id = part WHERE prompts.id = ?"
    name, start, size = db.execute(query, (prompt,)).fetchone()
    path = index.folder / "rollouts" / name
    try:
        require_inside(index.folder, path)
        with path.open("rb") as file:
            file.seek(start)
            return logged_prompt(parse_json(file.read(size)))
    except (OSError, ValueError) as error:
        raise Gone(f"{path} is not there as it was: the run was moved, deleted or resumed") from error


def _with_all_fields(line: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """An answer with every field that the page reads, and the prompt as its agent read it."""
    turns = answer.get("turns")
    return {
        **{"mean_logprob": None, "not_trained": {}, "tokens": None, "token_logprob": [], "token_ratio": []},
        **answer,
        **{"prompt_seen": line.get("prompt_seen", {}).get(answer["agent"]), "extracted": None, "rule": None},
        **({"turns": [{**turn, "text": turn.get("content")} for turn in turns]} if turns else {}),
        "turn": sum(turn.get("role") == "assistant" for turn in turns) if turns else None,
    }


def _compiled_regex(pattern: Any) -> Any:
    if not isinstance(pattern, str) or len(pattern) > MOST_PATTERN:
        raise ValueError(f"regex is {short(pattern)}, needs text of at most {MOST_PATTERN} characters")
    try:
        return regex.compile(pattern)
    except (regex.error, OverflowError, RecursionError) as error:
        raise ValueError(f"regex {short(pattern)} is none: {error}") from error


def _is_match(pattern: Any, text: str, most_s: float) -> bool:
    """True if the pattern is in a text; False, too, if the search takes longer than `most_s`."""
    try:
        return pattern.search(text, timeout=max(0.01, most_s), concurrent=True) is not None
    except TimeoutError:
        return False


def _regex_page(
    index: Index, db: sqlite3.Connection, query: str, values: list[Any], pattern: Any, page: int
) -> tuple[list[int], int, str | None]:
    """Ids on a page of the answers that match, the number of all that do, and a note if the time did not suffice."""
    end, matches, note = time.monotonic() + REGEX_S, [], None
    query = query.replace("SELECT id", "SELECT id, prompt, place", 1)
    for searched, (answer_id, _, answer) in enumerate(_logged_answers(index, db, db.execute(query, values))):
        left_s = end - time.monotonic()
        if left_s <= 0.0:
            note = f"search stopped after {REGEX_S:g} s and {searched:,} answers: narrow the selection, or export it"
            break
        if answer is not None and _is_match(pattern, answer["text"], left_s):
            matches.append(answer_id)
    return matches[page * PER_PAGE :][:PER_PAGE], len(matches), note
