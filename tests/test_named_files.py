"""Prose of docstrings, comments and documents: the files and headings that it names are there, and it is plain.

Plain: a sentence begins with its subject, not with a noun clause ("What it reads is") and not with "Of".
"""

import ast
import functools
import io
import os
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from house_rules import ROOT, Complaints, Source, Sources, read_sources

# A file of ours in a text, such as rollout/engine.py or env.sh; those of a run or a user are not ours.
NAMED_FILE = re.compile(r"(?<![\w/.{*$-])((?:[\w.-]+/)*[a-z][\w-]*\.(?:py|md|sh|sbatch))\b(?![:\w*])")
# A link of a document to another place of the repository, relative to the document, perhaps to a heading of it.
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
# A sentence that begins otherwise than with its subject. A question is none.
OPENINGS = "Of|What|Whose|Who|Whoever|Whatever|Those|How|Whether|Which"
INVERTED = re.compile(rf"(?:^|[.:!?] )\W*((?:{OPENINGS})\b[^.?]*)(?![^.?]*\?)")


def files_that_texts_name_exist(sources: Sources) -> Complaints:
    """A file that a docstring, a comment or a document names must be there."""
    known: set[str] = set()  # by every name that a text may use: engine.py, rollout/engine.py, and so on
    for path in written_files():
        parts = path.relative_to(ROOT).parts
        known |= {"/".join(parts[start:]) for start in range(len(parts))}
    for source in sources:
        for number, line in prose(source):
            for name in NAMED_FILE.findall(line):
                if name not in known:
                    yield f"{source.path}:{number}: names {name}, which is not in the repository"


def sentences_begin_with_their_subject(sources: Sources) -> Complaints:
    """A reader meets the subject first, then the verb."""
    for source in sources:
        for number, text in paragraphs(source):
            for found in INVERTED.findall(text):
                yield f"{source.path}:{number}: {found[:60]!r} begins with no subject"


def paragraphs(source: Source) -> Iterator[tuple[int, str]]:
    """(first line number, text) of prose without headings and blocks of code; an entry of a list is one."""
    first, last, words, is_fenced, is_page = 0, 0, [], False, source.path.endswith(".md")
    for number, line in prose(source):
        text = line.strip().lstrip("#").strip()
        is_fenced ^= text.startswith("```")
        is_other = is_fenced or (is_page and line.startswith(("#", "    ")))
        if words and (number != last + 1 or not text or is_other or text.startswith(("-", "|"))):
            yield first, " ".join(words)
            words = []
        if text and not is_other:
            first = first if words else number
            words.append(text)
        last = number
    if words:
        yield first, " ".join(words)


@functools.cache
def prose(source: Source) -> list[tuple[int, str]]:
    """(line number, text) for people: comments and docstrings of code, all of a document."""
    if not source.path.endswith(".py"):
        return list(enumerate(source.text.splitlines(), start=1))
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    lines = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    for node in source.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines += enumerate(node.value.value.splitlines(), start=node.lineno)
    return lines


def written_files() -> list[Path]:
    """Files that people write and read here: the repository without its environment, its runs and caches."""
    skipped, found = {".git", ".venv", "runs", "build", "results", "__pycache__"}, []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = set(folders) - skipped
        found += [Path(folder, file) for file in files]
    return found


def test_the_product_names_only_files_that_exist() -> None:
    complaints = list(files_that_texts_name_exist(read_sources()))
    assert complaints == [], "\n" + "\n".join(complaints)


@pytest.mark.parametrize("text", ['"""Groups are made in topology.py."""', "# see docs/elsewhere.md"])
def test_a_file_that_is_not_there_is_found(text: str) -> None:
    assert len(list(files_that_texts_name_exist([Source("hacpo_mega/agent/agent.py", text)]))) == 1


def test_the_product_and_the_documents_are_plain() -> None:
    pages = [Source(page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")) for page in documents()]
    complaints = list(sentences_begin_with_their_subject([*read_sources(), *pages]))
    assert complaints == [], "\n" + "\n".join(complaints)


@pytest.mark.parametrize("text", ["# What it reads is\n# a file.", 'x = 1\n"""One. Of two it is\nthe first."""'])
def test_an_inverted_sentence_is_found(text: str) -> None:
    assert len(list(sentences_begin_with_their_subject([Source("hacpo_mega/agent/agent.py", text)]))) == 1


@pytest.mark.parametrize("text", ["# It reads\n# What of it.", '"""What is it? A file."""', "x = 'What it is.'"])
def test_other_words_are_not(text: str) -> None:
    assert list(sentences_begin_with_their_subject([Source("hacpo_mega/agent/agent.py", text)])) == []


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def test_documents_name_only_files_that_exist() -> None:
    written = [page for page in documents() if page.name != "commands.md"]  # which quotes what commands write
    places = [ROOT / "Makefile", *written, *ROOT.glob("launch/*.*")]
    texts = [Source(path.relative_to(ROOT).as_posix(), LINK.sub("]", path.read_text("utf-8"))) for path in places]
    complaints = list(files_that_texts_name_exist(texts))
    assert complaints == [], "\n" + "\n".join(complaints)


def test_links_of_documents_lead_somewhere() -> None:
    broken = []
    for page in documents():
        for name, heading in LINK.findall(page.read_text(encoding="utf-8")):
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (heading and heading not in headings(target)):
                broken.append(f"{page.relative_to(ROOT)}: {name}#{heading}" if heading else f"{page.name}: {name}")
    assert broken == [], "\n" + "\n".join(broken)


def headings(page: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_no_two_test_files_have_one_name() -> None:
    """A rank that a test starts imports its file by name, and would take the other."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
