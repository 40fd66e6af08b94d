"""A rule of the house is a function from parsed files to complaints; here are the files."""

import ast
import functools
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from repository import ROOT

# The program itself, which is started by its name and not imported.
PROGRAM = "hacpo_mega.cli"
MODULE_NAME = re.compile(r"hacpo_(mega|lab|grading)(\.\w+)+")
# Packages beside the product, each in a folder of its own.
BESIDE = re.compile(r"^(kernels|packages/\w+)/")
DESCRIBED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def _parsed(path: str, text: str) -> ast.Module:
    return ast.parse(text, filename=path)


@functools.cache
def _nodes(path: str, text: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_parsed(path, text)))


@dataclass(frozen=True)
class Source:
    """A parsed file; `path` is relative to the root of the repository, with slashes."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return _parsed(self.path, self.text)

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, as ast.walk gives them; rules share one walk."""
        return _nodes(self.path, self.text)

    @functools.cached_property
    def module(self) -> str:
        """The dotted name; a package is named by its folder."""
        parts = PurePosixPath(BESIDE.sub("", self.path)).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def lies_in(self, places: tuple[str, ...]) -> bool:
        return any(self.path == place or (place.endswith("/") and self.path.startswith(place)) for place in places)

    @functools.cache  # noqa: B019, of a few hundred files
    def imports(self) -> tuple[tuple[int, str], ...]:
        """(line, dotted name) of everything imported anywhere in the file; `from a import b` gives a.b.

        A module's name in a string counts, too: whoever is given it imports it.
        """
        return tuple(self._imports())

    def _imports(self) -> Iterator[tuple[int, str]]:
        package = self.module if self.path.endswith("__init__.py") else self.module.rpartition(".")[0]
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Constant) and MODULE_NAME.fullmatch(str(node.value)) and node.value != PROGRAM:
                yield node.lineno, node.value

    def net_lines(self) -> int:
        """Lines of code: no blank line, comment, docstring or import."""
        left_out: set[int] = set()
        texts: set[int] = set()  # of several lines, where a line that begins with "#" is no comment
        for node in self.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                left_out.update(range(node.lineno, node.end_lineno + 1))
            elif isinstance(node, DESCRIBED) and ast.get_docstring(node, clean=False) is not None:
                left_out.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
            elif isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno > node.lineno:
                texts.update(range(node.lineno + 1, node.end_lineno + 1))
        lines = ((number, line.strip()) for number, line in enumerate(self.text.splitlines(), start=1))
        return sum(
            bool(line) and number not in left_out and (number in texts or not line.startswith("#"))
            for number, line in lines
        )


@dataclass(frozen=True)
class Limits:
    """Today's numbers and exceptions of tests/limits.toml, which shrink only.

    net_lines      by room, the most lines of code
    one_importer   files of the product that one file of their own room imports, and no other
    class_names    public classes whose name stands more than once, with how often
    docstrings     by room, the most docstrings that open with a question word, "Of", "That" or "Those"
    """

    net_lines: dict[str, int]
    one_importer: list[str]
    class_names: dict[str, int]
    docstrings: dict[str, int]


@functools.cache
def read_limits() -> Limits:
    return Limits(**tomllib.loads((ROOT / "tests" / "limits.toml").read_text(encoding="utf-8")))


Sources = list[Source]
Complaints = Iterator[str]


@functools.cache
def read_sources() -> Sources:
    beside = [ROOT / "kernels" / "hacpo_kernels", *(folder / folder.name for folder in (ROOT / "packages").iterdir())]
    files = sorted(file for folder in (ROOT / "hacpo_mega", *beside) for file in folder.rglob("*.py"))
    return [Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def functions(source: Source) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in source.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


Rule = Callable[[Sources], Complaints]
