"""The index of a run: the data of its files in a SQLite file of the user's cache, extended as the files grow.

metrics.jsonl is read from where the last look ended; a line without its end is read later. A run that resumed has
written the file anew: the lines before the first that differs stay. The answers of a lane and step are one file, a
part, which is there whole or not at all; it is read again only where it has changed. Texts of answers stay in the run:
the index has their words and their first characters. Nothing is ever written into a run. Elsewhere: queries
(answers.py, views.py).
"""

import hashlib
import math
import os
import socket
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from hacpo_mega.cluster.machine.environment import user_cache
from hacpo_mega.config.checks.run_dirs import METRICS, STARTS
from hacpo_mega.logbook.files.metrics import metrics_of
from hacpo_mega.logbook.files.rollout_log import PART, place_of, read_part
from hacpo_mega.models.files.documents import parse_json
from hacpo_mega.models.files.links import require_inside
from hacpo_mega.models.files.visible import one_line

VERSION = 1
BUSY_S = 10.0  # seconds to wait for another process that writes the same index
EXCERPT = 200  # characters of an answer that a list shows
BATCH_BYTES = 1 << 20  # of metrics between two looks at the clock
MOST_NOTES = 20
SCHEMA = """
CREATE TABLE state (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE words (id INTEGER PRIMARY KEY, kind TEXT, word TEXT, UNIQUE (kind, word));
CREATE TABLE lines (start INTEGER PRIMARY KEY, end INTEGER, step INTEGER, digest BLOB);
CREATE TABLE metrics (name INTEGER, step INTEGER, value REAL, PRIMARY KEY (name, step)) WITHOUT ROWID;
CREATE TABLE parts (id INTEGER PRIMARY KEY, name TEXT UNIQUE, step INTEGER, changed_ns INTEGER, size INTEGER);
CREATE TABLE prompts (id INTEGER PRIMARY KEY, part INTEGER, start INTEGER, size INTEGER, step INTEGER, lane INTEGER,
    prompt_index INTEGER, prompt_id TEXT);
CREATE TABLE answers (id INTEGER PRIMARY KEY AUTOINCREMENT, prompt INTEGER, place INTEGER, step INTEGER, agent INTEGER,
    rollout INTEGER, skill INTEGER, reward REAL, verdict INTEGER, stop INTEGER, length INTEGER, turn INTEGER);
CREATE TABLE excerpts (id INTEGER PRIMARY KEY, text TEXT);
CREATE VIRTUAL TABLE texts USING fts5(text, content='');
CREATE INDEX lines_by_step ON lines (step);
CREATE INDEX prompts_by_part ON prompts (part);
CREATE INDEX prompts_by_id ON prompts (prompt_id);
CREATE INDEX answers_by_prompt ON answers (prompt);
CREATE INDEX answers_by_step ON answers (step);
"""
ANSWER = "prompt, place, step, agent, rollout, skill, reward, verdict, stop, length, turn"


class Gone(ValueError):
    """An answer is in the index, but no longer in the run's files."""


class Index:
    """The index of one run. Every method opens the file anew, so that any thread may call it.

    folder   of the run      path   of the index      notes   lines about what could not be read, the newest last
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """Opens the run's index, or creates it; `say` gets a line where an older one cannot be used.

        Where the user's cache cannot hold it (no locks, no room, no rights) it lies in a folder of its own in TMPDIR.
        ValueError where that cannot hold it either.
        """
        self.folder = Path(os.path.realpath(folder))
        self.notes: list[str] = []
        self._say = say
        self._ids: dict[tuple[str, str], int] = {}
        self._columns: set[str] = set()
        self._seen: tuple[Any, ...] = ()  # state of the run's files at the last look
        self._is_behind, self._checks_known_parts = True, True
        name = f"{hashlib.sha256(bytes(self.folder)).hexdigest()[:16]}.{socket.gethostname()}.sqlite"
        cache = Path("the home's cache")
        try:
            cache = user_cache() / "hacpo-mega" / "watch"
            self._open(cache / name)
        except (OSError, sqlite3.OperationalError) as error:
            aside = Path(tempfile.gettempdir()) / f"hacpo-mega-watch-{os.getuid()}"
            say(f"{cache} cannot hold an index ({error}): it lies in {aside} now. Set XDG_CACHE_HOME to a local folder")
            try:
                self._open(aside / name)
            except (OSError, sqlite3.OperationalError) as other:
                raise ValueError(f"{aside} cannot hold an index either ({other}): set XDG_CACHE_HOME") from other

    def _open(self, path: Path) -> None:
        """Creates the file if it is missing or of another version. OSError or OperationalError if that fails."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = path.parent.lstat()  # in TMPDIR another user may have made it, or a link of that name
        if folder.st_uid != os.getuid() or not stat.S_ISDIR(folder.st_mode):
            raise PermissionError(f"{path.parent} is no folder of this user's")
        self.path = path
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))  # nobody else may read the answers
        try:
            with self._writing() as db:
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version == 0 and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
                    self._create_tables(db)
                elif version == VERSION:
                    return
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            version = str(error)
        if version:
            self._say(f"the index of {self.folder} is of another version ({version}): it is built anew")
            path.unlink()
            self._open(path)

    def _create_tables(self, db: sqlite3.Connection) -> None:
        for statement in SCHEMA.split(";\n"):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("INSERT INTO state VALUES ('generation', 0)")

    def reading(self) -> "closing[sqlite3.Connection]":
        """A connection that closes at the end of a `with`."""
        db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
        db.execute("PRAGMA cache_size = -16000")
        db.execute("PRAGMA temp_store = MEMORY")
        return closing(db)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A connection inside a transaction that is committed at the end, or undone by an error."""
        with self.reading() as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = OFF")  # after a power cut the index can be built anew from the run
            db.execute("BEGIN IMMEDIATE")
            self._ids.clear()  # another process may have built the index anew
            self._columns = {row[1] for row in db.execute("PRAGMA table_info(answers)")}
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.OperationalError):
                    db.execute("ROLLBACK")
                raise

    def extend(self, most_s: float = 1.0) -> bool:
        """Reads what the run has written since the last look, for about `most_s` seconds; True if the index changed.

        A run that is gone changes nothing. OperationalError where another process holds the index for too long.
        """
        if not self.folder.is_dir():
            return False
        begin, seen = time.monotonic(), _file_states(self.folder)
        if not self._is_behind and seen == self._seen:
            return False
        self._is_behind = True
        with self._writing() as db:
            is_emptied = self._check_identity(db)
            # Half of the time each: the newest answers do not wait for all metrics.
            has_all_metrics, metrics_changed = self._read_metrics(db, begin + most_s / 2.0)
            has_all_parts, parts_changed = self._read_parts(db, most_s / 2.0)
        changed = is_emptied or metrics_changed or parts_changed
        # After a change comes another look: a further change may have the same time by the file system's clock.
        self._seen, self._is_behind = seen, changed or not (has_all_metrics and has_all_parts)
        return changed

    def _check_identity(self, db: sqlite3.Connection) -> bool:
        """Empties the index if the folder holds another run by now; True if it did.

        After a new start of the run all known parts are checked for changes.
        """
        content = _start_of_file(self.folder / STARTS)
        identity = hashlib.sha256(content.partition(b"\n")[0]).hexdigest()
        known, num_starts = _get(db, "identity"), content.count(b"\n")
        if known is not None and known != identity:
            self.note(f"{self.folder} holds another run now: its index begins anew")
            for table in ("lines", "metrics", "parts", "prompts", "answers", "excerpts"):
                db.execute(f"DELETE FROM {table}")
            db.execute("DELETE FROM words WHERE kind != 'learner'")  # columns are named by the ids of learners
            self._ids.clear()
            _set(db, "metrics_end", 0)
            _set(db, "generation", _get(db, "generation") + 1)
        if known != identity or num_starts != _get(db, "starts"):
            self._checks_known_parts = True
            _set(db, "identity", identity)
            _set(db, "starts", num_starts)
        return known is not None and known != identity

    def _read_metrics(self, db: sqlite3.Connection, end_s: float) -> tuple[bool, bool]:
        """Reads the new lines of metrics.jsonl until `end_s`; lines that a resumed run replaced are forgotten.

        Returns whether all are read, and whether anything changed.
        """
        path = self.folder / METRICS
        try:
            require_inside(self.folder, path)
            file = path.open("rb")
        except FileNotFoundError:
            return True, False
        except (OSError, ValueError) as error:
            self.note(str(error))
            return True, False
        with file:
            changed = self._forget_replaced(db, file)
            _set(db, "metrics_size", os.fstat(file.fileno()).st_size)
            file.seek(_get(db, "metrics_end", 0))
            while lines := file.readlines(BATCH_BYTES):
                for line in lines:
                    if not line.endswith(b"\n"):
                        return True, changed
                    self._add_metrics(db, line)
                    changed = True
                if time.monotonic() > end_s:
                    return False, changed
        return True, changed

    def _forget_replaced(self, db: sqlite3.Connection, file: Any) -> bool:
        """Forgets the lines from the first on that has changed; True if there is one. Their steps are read again."""
        info = os.fstat(file.fileno())
        known, inode = _get(db, "metrics_end", 0), _get(db, "metrics_inode")
        _set(db, "metrics_inode", info.st_ino)
        if inode in (None, info.st_ino) and info.st_size >= known:
            return False
        for start, end, digest in db.execute("SELECT start, end, digest FROM lines ORDER BY start").fetchall():
            file.seek(start)
            if _digest(file.read(end - start)) != digest:
                break
        else:
            return False
        step = db.execute("SELECT min(step) FROM lines WHERE start >= ?", (start,)).fetchone()[0]
        restart = db.execute("SELECT min(start) FROM lines WHERE step >= ?", (step,)).fetchone()[0]
        db.execute("DELETE FROM lines WHERE start >= ?", (restart,))
        db.execute("DELETE FROM metrics WHERE step >= ?", (step,))
        _set(db, "metrics_end", restart)
        _set(db, "generation", _get(db, "generation") + 1)
        return True

    def _add_metrics(self, db: sqlite3.Connection, line: bytes) -> None:
        start = _get(db, "metrics_end", 0)
        step = None
        with suppress(ValueError):
            step, found = metrics_of(parse_json(line))
        if step is None:
            self.note(f"{self.folder / METRICS}: no line of metrics at byte {start:,}; it is left out")
        else:
            numbers = (found.values | found.timing).items()
            rows = [(self._id(db, "metric", name), step, value) for name, value in numbers]
            db.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", rows)
        db.execute("INSERT INTO lines VALUES (?, ?, ?, ?)", (start, start + len(line), step, _digest(line)))
        _set(db, "metrics_end", start + len(line))

    def _read_parts(self, db: sqlite3.Connection, most_s: float) -> tuple[bool, bool]:
        """Reads the new and changed parts, the newest first, for `most_s` seconds; forgets those that are gone.

        The time begins when their names are known: listing 20,000 steps of 8 lanes takes longer than a look may.
        Returns whether all are read, and whether anything changed.
        """
        folder = self.folder / "rollouts"
        try:
            if Path(os.path.realpath(folder)) != folder:
                raise ValueError(f"{folder} is a link, which is not followed: give the run that it lies in")
            names = {entry.name for entry in os.scandir(folder) if PART.fullmatch(entry.name)}
        except FileNotFoundError:
            names = set()
        except (OSError, ValueError) as error:
            self.note(str(error))
            return True, False
        known = {name: rest for name, *rest in db.execute("SELECT name, id, changed_ns, size FROM parts")}
        checks_known, self._checks_known_parts = self._checks_known_parts, False
        stale = [name for name in known if name not in names or (checks_known and _has_changed(folder / name, known))]
        for name in stale:
            self._forget_part(db, known[name][0])
        new = sorted(names - known.keys() | (names & set(stale)), reverse=True)
        _set(db, "unread", 0)
        end_s = time.monotonic() + most_s
        for number, name in enumerate(new):
            if number and time.monotonic() > end_s:
                _set(db, "unread", len(new) - number)
                return False, True
            with suppress(FileNotFoundError):  # the run resumes at this moment
                self._add_part(db, folder / name)
        return True, bool(stale or new)

    def _forget_part(self, db: sqlite3.Connection, part: int) -> None:
        """Deletes a part, except its words in `texts`: no row has their ids, which are never used again."""
        rows = "SELECT answers.id FROM answers JOIN prompts ON prompts.id = answers.prompt WHERE part = ?"
        db.execute(f"DELETE FROM excerpts WHERE id IN ({rows})", (part,))
        db.execute(f"DELETE FROM answers WHERE id IN ({rows})", (part,))
        db.execute("DELETE FROM prompts WHERE part = ?", (part,))
        db.execute("DELETE FROM parts WHERE id = ?", (part,))

    def _add_part(self, db: sqlite3.Connection, path: Path) -> None:
        info, (step, _) = path.stat(), place_of(path)
        row = (path.name, step, info.st_mtime_ns, info.st_size)
        part = db.execute("INSERT INTO parts VALUES (NULL, ?, ?, ?, ?)", row).lastrowid
        end, last = 0, 0
        try:
            for number, text, line in read_part(path, self.folder):
                start = end + (number - last - 1)  # the lines between are empty, of one byte each
                end, last = start + len(text) + 1, number
                row = (part, start, len(text), line["step"], line["lane"], line["prompt_index"], line["id"])
                prompt = db.execute("INSERT INTO prompts VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", row).lastrowid
                for place, answer in enumerate(line["answers"]):
                    self._add_answer(db, prompt, place, line, answer)
        except (OSError, ValueError) as error:
            self.note(str(error))

    def _add_answer(
        self, db: sqlite3.Connection, prompt: int, place: int, line: Mapping[str, Any], answer: Mapping[str, Any]
    ) -> None:
        num_turns = sum(turn.get("role") == "assistant" for turn in answer.get("turns", ())) or None
        agent, skill, verdict, stop = (
            self._id(db, kind, fields[kind])
            for kind, fields in (("agent", answer), ("skill", line), ("verdict", answer), ("stop", answer))
        )
        columns, values = ANSWER, [prompt, place, line["step"], agent, answer["rollout"], skill, answer["reward"]]
        values += [verdict, stop, answer["num_tokens"], num_turns]
        for field in ("ratio", "advantage"):
            for learner, value in answer[field].items():
                columns += f", {self._column(db, field, learner)}"
                values.append(value)
        placeholders = ", ".join("?" * len(values))
        answer_id = db.execute(f"INSERT INTO answers ({columns}) VALUES ({placeholders})", values).lastrowid
        text = answer["text"].encode(errors="replace").decode()
        db.execute("INSERT INTO excerpts VALUES (?, ?)", (answer_id, text[:EXCERPT]))
        db.execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (answer_id, text))

    def _column(self, db: sqlite3.Connection, field: str, learner: str) -> str:
        """The column of a learner's "ratio" or "advantage", which is added when its first value comes."""
        name = f"{field}_{self._id(db, 'learner', learner)}"
        if name not in self._columns:
            db.execute(f"ALTER TABLE answers ADD COLUMN {name} REAL")
            self._columns.add(name)
        return name

    def _id(self, db: sqlite3.Connection, kind: str, word: str) -> int:
        """The id of a word of a kind; a new word gets one."""
        if (known := self._ids.get((kind, word))) is None:
            db.execute("INSERT OR IGNORE INTO words VALUES (NULL, ?, ?)", (kind, word))
            row = db.execute("SELECT id FROM words WHERE kind = ? AND word = ?", (kind, word)).fetchone()
            known = self._ids[kind, word] = row[0]
        return known

    def note(self, text: str) -> None:
        text = one_line(text)
        self.notes = [*(note for note in self.notes if note != text), text][-MOST_NOTES:]


def progress_of(db: sqlite3.Connection) -> str | None:
    """The progress of indexing a run, as text; None if nothing is missing."""
    unread, size, end = (_get(db, key, 0) for key in ("unread", "metrics_size", "metrics_end"))
    if not unread and size - end < BATCH_BYTES:  # a line that is being written is no backlog
        return None
    known = db.execute("SELECT count(*) FROM parts").fetchone()[0]
    progress = {"the metrics": (end, size), "the answers": (known, known + unread)}
    shares = [f"{math.floor(100 * done / total)} % of {data}" for data, (done, total) in progress.items() if total]
    return f"indexing: {', '.join(shares)}"


def learner_columns(db: sqlite3.Connection, field: str) -> dict[str, str]:
    """By learner, the column of its "ratio" or "advantage", for those that have one."""
    columns = {row[1] for row in db.execute("PRAGMA table_info(answers)")}
    words = db.execute("SELECT word, id FROM words WHERE kind = 'learner' ORDER BY id")
    return {word: column for word, number in words if (column := f"{field}_{number}") in columns}


def words_of(db: sqlite3.Connection, kind: str) -> list[str]:
    """The known words of a kind: "metric", "agent", "skill", "verdict", "stop"; by name."""
    return [row[0] for row in db.execute("SELECT word FROM words WHERE kind = ? ORDER BY word", (kind,))]


def _get(db: sqlite3.Connection, key: str, default: Any = None) -> Any:
    row = db.execute("SELECT value FROM state WHERE key = ?", (key,)).fetchone()
    return default if row is None else row[0]


def _set(db: sqlite3.Connection, key: str, value: Any) -> None:
    db.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (key, value))


def _digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=8).digest()


def _start_of_file(path: Path) -> bytes:
    """The first MiB of a plain file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(1 << 20) if path.is_file() else b""
    except OSError:
        return b""


def _file_states(folder: Path) -> tuple[Any, ...]:
    """States of a run's files, which change with their content.

    The files are opened, since a network file system may answer from its cache for one that is not.
    """
    states: list[Any] = []
    for name in (METRICS, STARTS, "rollouts"):
        try:
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK)
            info = os.fstat(descriptor)
            os.close(descriptor)
            states.append((info.st_ino, info.st_size, info.st_mtime_ns))
        except OSError:
            states.append(None)
    return tuple(states)


def _has_changed(path: Path, known: Mapping[str, list[int]]) -> bool:
    """True if a part is not the file that was read, by the `known` (id, time, size) of its name."""
    try:
        info = path.stat()
    except OSError:
        return True
    return known[path.name][1:] != [info.st_mtime_ns, info.st_size]
