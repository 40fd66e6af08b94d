"""Whether reward.kind names a grader: one of ours by name, or a function of the user's, found without running its file.

A module is looked for where Python would, but nothing is imported: the source is parsed for the name.
"""

import ast
import difflib
import importlib.machinery
import importlib.util
from pathlib import Path

from hacpo_mega.config.choices import REWARD_KINDS


def grader_problem(kind: str) -> str | None:
    """What is wrong with a reward kind, or None."""
    place, colon, name = kind.rpartition(":")
    if kind in REWARD_KINDS:
        return None
    if not colon:
        near = difflib.get_close_matches(kind, REWARD_KINDS, n=1, cutoff=0.5)
        return (
            f"{kind!r} is unknown; known: {', '.join(REWARD_KINDS)}, or your own as module:function or file.py:function"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    if not place or not name.isidentifier():
        return f"{kind!r} is no grader; write module:function or file.py:function"
    if place.endswith(".py"):
        file = Path(place)
        return _source_problem(file, name) if file.is_file() else f"{kind!r}: the file {place} does not exist"
    return code_problem(place, name)


def code_problem(module: str, name: str, what: str = "function") -> str | None:
    """Why Python would not find `name`, a function or class, in a module of this name; None where it would.

    The parents of a module are walked by their folders: `find_spec` would import them.
    """
    first, *rest = module.split(".")
    # The ranks of a job run with the current folder on their path; this process may not.
    spec = importlib.util.find_spec(first) if first else None
    spec = spec or importlib.machinery.PathFinder.find_spec(first, [str(Path.cwd())])
    path = first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            break
        path = f"{path}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(path, list(spec.submodule_search_locations))
    if spec is None or path != module:
        or_file = f", or file.py:{name}" if what == "function" else ""
        return f"there is no module {module!r}; give one that Python finds from here{or_file}"
    if spec.origin is None:
        return f"{module!r} is a folder without code; name a module in it"
    return _source_problem(Path(spec.origin), name, what) if spec.origin.endswith(".py") else None


def _source_problem(file: Path, name: str, what: str = "function") -> str | None:
    """Whether a file's source binds `name` at its top, as far as that can be read from it."""
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        return f"{file} is no Python source: {error or type(error).__name__}"
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
    bound = _bound_names(tree)
    if name in bound or "*" in bound:
        return None
    near = difflib.get_close_matches(name, sorted(bound), n=1)
    return f"{file} has no {what} {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _bound_names(tree: ast.Module) -> set[str]:
    """Names that a module's statements bind outside functions and classes; `*` for a star import."""
    names: set[str] = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        waiting.extend(ast.iter_child_nodes(node))
    return names
