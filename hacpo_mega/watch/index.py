"""The index of a run: what its files say, read once, in a SQLite file of the user's cache, and extended as they grow.

metrics.jsonl is read from where the last look ended; a line that is cut waits for its end. A run that resumed has
written its file anew: what is equal up to there stays. A lane's answers of a step are one file that is there whole or
not at all; it is read again only where it has changed. Texts of answers stay in the run: the index has their words and
their first characters. Nothing is ever written into a run. Elsewhere: questions to the index (answers.py, views.py).
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
BUSY_S = 10.0  # to wait for another process that writes the same index
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
    """The index knows an answer that the run's files no longer have."""


class Index:
    """The index of one run. Every method opens the file anew, so that any thread may call it.

    folder   the run's      path   the index      notes   lines about what could not be read, the newest last
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """Opens the run's index, or begins one; `say` gets the line where an older one cannot be used.

        Where the user's cache cannot hold it (no locks, no room, no rights) it lies in a folder of its own in TMPDIR.
        ValueError where that cannot either.
        """
        self.folder = Path(os.path.realpath(folder))
        self.notes: list[str] = []
        self._say = say
        self._ids: dict[tuple[str, str], int] = {}
        self._columns: set[str] = set()
        self._seen: tuple[Any, ...] = ()  # state of the run's files at the last look
        self._is_behind, self._looks_at_all = True, True
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
        """Makes the file where it is missing or another version's. OSError or OperationalError where it cannot be."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = path.parent.lstat()  # in TMPDIR anybody may have made it, or a link of that name
        if folder.st_uid != os.getuid() or not stat.S_ISDIR(folder.st_mode):
            raise PermissionError(f"{path.parent} is no folder of this user's")
        self.path = path
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))  # answers are their reader's alone
        try:
            with self._writing() as db:
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version == 0 and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
                    self._begin(db)
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

    def _begin(self, db: sqlite3.Connection) -> None:
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
            db.execute("PRAGMA synchronous = OFF")  # the run has it all: after a power cut the index is built anew
            db.execute("BEGIN IMMEDIATE")
            self._ids.clear()  # another process may have begun the index anew
            self._columns = {row[1] for row in db.execute("PRAGMA table_info(answers)")}
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.OperationalError):
                    db.execute("ROLLBACK")
                raise

    def extend(self, most_s: float = 1.0) -> bool:
        """Reads what the run has written since, for about `most_s` seconds; True if there was something.

        A run that is gone changes nothing. OperationalError where another process holds the index for too long.
        """
        if not self.folder.is_dir():
            return False
        begin, seen = time.monotonic(), _looks_of(self.folder)
        if not self._is_behind and seen == self._seen:
            return False
        self._is_behind = True
        with self._writing() as db:
            begins_anew = self._see_identity(db)
            is_whole, changed = self._read_metrics(db, begin + most_s / 2.0)  # the newest answers do not wait for all
            has_all, has_parts = self._read_parts(db, most_s / 2.0)
        changed = begins_anew or changed or has_parts
        # A change within one tick of the file system's clock shows at the next look alone.
        self._seen, self._is_behind = seen, changed or not (is_whole and has_all)
        return changed

    def _see_identity(self, db: sqlite3.Connection) -> bool:
        """Empties the index where another run lies in the folder by now. After a new start all parts are looked at."""
        content = _start_of_file(self.folder / STARTS)
        identity = hashlib.sha256(content.partition(b"\n")[0]).hexdigest()
        known, length = _get(db, "identity"), content.count(b"\n")
        if known is not None and known != identity:
            self.note(f"{self.folder} holds another run now: its index begins anew")
            for table in ("lines", "metrics", "parts", "prompts", "answers", "excerpts"):
                db.execute(f"DELETE FROM {table}")
            db.execute("DELETE FROM words WHERE kind != 'learner'")  # columns are named after those
            self._ids.clear()
            _set(db, "metrics_end", 0)
            _set(db, "generation", _get(db, "generation") + 1)
        if known != identity or length != _get(db, "starts"):
            self._looks_at_all = True
            _set(db, "identity", identity)
            _set(db, "starts", length)
        return known is not None and known != identity

    def _read_metrics(self, db: sqlite3.Connection, end_s: float) -> tuple[bool, bool]:
        """Reads the new lines of metrics.jsonl, as many as the time allows; those that a resumed run replaced go.

        Returns whether all are read, and whether there was something new.
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
            is_new = self._forget_replaced(db, file)
            _set(db, "metrics_size", os.fstat(file.fileno()).st_size)
            file.seek(_get(db, "metrics_end", 0))
            while lines := file.readlines(BATCH_BYTES):
                for line in lines:
                    if not line.endswith(b"\n"):
                        return True, is_new
                    self._add_metrics(db, line)
                    is_new = True
                if time.monotonic() > end_s:
                    return False, is_new
        return True, is_new

    def _forget_replaced(self, db: sqlite3.Connection, file: Any) -> bool:
        """Forgets the lines that are no longer as they were; True if there were some. Their steps are read again."""
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
        """Reads parts that are new or have changed, the newest first, as many as the time allows; forgets lost ones.

        The time begins when their names are known: those of 20,000 steps of 8 lanes take longer than a look.
        Returns whether all are read, and whether there was something new.
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
        lost = [name for name in known if name not in names or (self._looks_at_all and _is_other(folder / name, known))]
        self._looks_at_all = False
        for name in lost:
            self._forget_part(db, known[name][0])
        new = sorted(names - known.keys() | (names & set(lost)), reverse=True)
        _set(db, "unread", 0)
        end_s = time.monotonic() + most_s
        for number, name in enumerate(new):
            if number and time.monotonic() > end_s:
                _set(db, "unread", len(new) - number)
                return False, True
            with suppress(FileNotFoundError):  # the run resumes at this moment
                self._add_part(db, folder / name)
        return True, bool(lost or new)

    def _forget_part(self, db: sqlite3.Connection, part: int) -> None:
        """Their words stay in the index of texts, which no row leads to any more: their numbers are not used again."""
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
                end, last, start = end + len(text) + number - last, number, end + number - last - 1
                row = (part, start, len(text), line["step"], line["lane"], line["prompt_index"], line["id"])
                prompt = db.execute("INSERT INTO prompts VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", row).lastrowid
                for place, answer in enumerate(line["answers"]):
                    self._add_answer(db, prompt, place, line, answer)
        except (OSError, ValueError) as error:
            self.note(str(error))

    def _add_answer(
        self, db: sqlite3.Connection, prompt: int, place: int, line: Mapping[str, Any], answer: Mapping[str, Any]
    ) -> None:
        turns = sum(turn.get("role") == "assistant" for turn in answer.get("turns", ())) or None
        agent, skill, verdict, stop = (
            self._id(db, kind, word)
            for kind, word in (
                *(("agent", answer["agent"]), ("skill", line["skill"])),
                *(("verdict", answer["verdict"]), ("stop", answer["stop"])),
            )
        )
        columns, values = ANSWER, [prompt, place, line["step"], agent, answer["rollout"], skill, answer["reward"]]
        values += [verdict, stop, answer["num_tokens"], turns]
        for what in ("ratio", "advantage"):
            for learner, value in answer[what].items():
                columns += f", {self._column(db, what, learner)}"
                values.append(value)
        marks = ", ".join("?" * len(values))
        found = db.execute(f"INSERT INTO answers ({columns}) VALUES ({marks})", values).lastrowid
        text = answer["text"].encode(errors="replace").decode()
        db.execute("INSERT INTO excerpts VALUES (?, ?)", (found, text[:EXCERPT]))
        db.execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (found, text))

    def _column(self, db: sqlite3.Connection, what: str, learner: str) -> str:
        """The column of a learner's ratios or advantages, which is added for the first of them."""
        name = f"{what}_{self._id(db, 'learner', learner)}"
        if name not in self._columns:
            db.execute(f"ALTER TABLE answers ADD COLUMN {name} REAL")
            self._columns.add(name)
        return name

    def _id(self, db: sqlite3.Connection, kind: str, word: str) -> int:
        """The number of a word of a kind, which is given to a new one."""
        if (found := self._ids.get((kind, word))) is None:
            db.execute("INSERT OR IGNORE INTO words VALUES (NULL, ?, ?)", (kind, word))
            row = db.execute("SELECT id FROM words WHERE kind = ? AND word = ?", (kind, word)).fetchone()
            found = self._ids[kind, word] = row[0]
        return found

    def note(self, text: str) -> None:
        text = one_line(text)
        self.notes = [*(note for note in self.notes if note != text), text][-MOST_NOTES:]


def progress_of(db: sqlite3.Connection) -> str | None:
    """The parts of a run that are in its index by now, as text; None if nothing is missing."""
    unread, size, end = (_get(db, key, 0) for key in ("unread", "metrics_size", "metrics_end"))
    if not unread and size - end < BATCH_BYTES:  # a line that is being written is no backlog
        return None
    known = db.execute("SELECT count(*) FROM parts").fetchone()[0]
    shares = {"the metrics": (end, size), "the answers": (known, known + unread)}
    told = [f"{math.floor(100 * done / every)} % of {what}" for what, (done, every) in shares.items() if every]
    return f"indexing: {', '.join(told)}"


def learners_of(db: sqlite3.Connection, what: str) -> dict[str, str]:
    """By learner the column of its "ratio" or "advantage", for those that have one."""
    columns = {row[1] for row in db.execute("PRAGMA table_info(answers)")}
    words = db.execute("SELECT word, id FROM words WHERE kind = 'learner' ORDER BY id")
    return {word: column for word, number in words if (column := f"{what}_{number}") in columns}


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
    """The first MiB of a plain file; nothing where there is none that can be read."""
    try:
        with path.open("rb") as file:
            return file.read(1 << 20) if path.is_file() else b""
    except OSError:
        return b""


def _looks_of(folder: Path) -> tuple[Any, ...]:
    """State of a run's files that changes with their content. Opened: a network file system then asks its server."""
    found: list[Any] = []
    for name in (METRICS, STARTS, "rollouts"):
        try:
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK)
            info = os.fstat(descriptor)
            os.close(descriptor)
            found.append((info.st_ino, info.st_size, info.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)


def _is_other(path: Path, known: Mapping[str, list[int]]) -> bool:
    """True if a part is not the file that was read."""
    try:
        info = path.stat()
    except OSError:
        return True
    return known[path.name][1:] != [info.st_mtime_ns, info.st_size]
