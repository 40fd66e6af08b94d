"""Checks that reward.kind names a grader with these options: a built-in one, or the user's, found without running it.

A module is looked for where Python would, but nothing is imported: the source is parsed for the name and its signature.
"""

import ast
import difflib
import importlib.machinery
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from hacpo_grading.registry import GRADERS, value_problem

# Any of these among its parameters, and a grader is called by name.
VERL = ({"solution_str", "ground_truth"}, {"solution_strs", "ground_truths"})
ASKED_BY_NAME = ({"answer"}, {"answers"}, {"completions"}, *VERL)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def grader_problem(kind: str, options: Mapping[str, object] = MappingProxyType({})) -> str | None:
    """The problem of a reward kind, or None; `options` are passed to it as well."""
    place, colon, name = kind.rpartition(":")
    if kind in GRADERS:
        return None
    if not colon:
        near = difflib.get_close_matches(kind, GRADERS, n=1, cutoff=0.5)
        return (
            f"{kind!r} is unknown; known: {', '.join(GRADERS)}, or your own as module:function or file.py:function"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    if not place or not name.isidentifier():
        return f"{kind!r} is no grader; write module:function or file.py:function"
    return own_code_problem(kind) or _call_problem(kind, options)


def _call_problem(kind: str, options: Mapping[str, object]) -> str | None:
    """The reason why a grader cannot be called, by its source; a worker asks the function (grader_signature.py)."""
    found = _definition(kind)
    if isinstance(found, ast.ClassDef):
        may_call = found.bases or found.decorator_list or "__call__" in _bound_names(ast.Module(found.body, []))
        return None if may_call else f"{kind!r} is a class without __call__, and a grader is called"
    if not isinstance(found, FUNCTIONS):
        return None
    fixed = [argument.arg for argument in (*found.args.posonlyargs, *found.args.args)]
    needed = [a.arg for a, default in zip(found.args.kwonlyargs, found.args.kw_defaults) if default is None]
    needed = [name for name in needed if name not in options]
    if any(names <= {*fixed, *needed} for names in ASKED_BY_NAME):
        return None
    most = 3 if found.args.vararg else len(fixed)
    if len(fixed) - len(found.args.defaults) <= 3 <= most and not needed:
        return None
    return (
        f"{kind!r} takes ({ast.unparse(found.args)}), and a grader is called with (prompt, answer, gold), or by name "
        "where it takes answer, answers, TRL's completions, or verl's solution_str and ground_truth"
    )


def own_code_problem(name: str, num_arguments: int | None = None, what: str = "function") -> str | None:
    """The reason why "module:function" or "file.py:function" cannot be called with so many arguments, or None."""
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        file = Path(place)
        is_other = "is a folder, a pipe or a device" if os.path.exists(file) else "does not exist"
        missing = f"{name[-200:]!r}: the file {place[-200:]} {is_other}"
        found = _source_problem(file, attribute, what) if os.path.isfile(file) else missing  # also for too long a name
    else:
        found = code_problem(place, attribute, what)
    made = None if found or num_arguments is None else _definition(name)
    if not isinstance(made, FUNCTIONS) or made.args.vararg:
        return found
    takes = [*made.args.posonlyargs, *made.args.args]
    if not len(takes) - len(made.args.defaults) <= num_arguments <= len(takes):
        return f"{name!r} takes {len(takes)} arguments, and is given {num_arguments}"
    return None


def tracker_problem(name: str) -> str | None:
    """The reason why a user's class is no tracker (logbook/files/trackers.py), as far as its source tells; or None."""
    problem = own_code_problem(name, num_arguments=1, what="class")
    found = None if problem else _definition(name)
    if not isinstance(found, ast.ClassDef) or found.bases or found.decorator_list:
        return problem
    has = _bound_names(ast.Module(found.body, []))
    if missing := [method for method in ("log", "finish") if method not in has]:
        return f"{name!r} has no {' and no '.join(missing)}, which every tracker has (docs/guide/monitoring.md)"
    made = next((node for node in found.body if getattr(node, "name", None) == "__init__"), None)
    arguments = (
        made.args if isinstance(made, FUNCTIONS) else ast.arguments([], [ast.arg("self")], None, [], [], None, [])
    )
    takes = [*arguments.posonlyargs, *arguments.args][1:]
    if arguments.vararg or len(takes) - len(arguments.defaults) <= 1 <= len(takes):
        return None
    return f"{name!r} is made with {len(takes)} arguments, and is given one, the run (docs/guide/monitoring.md)"


def option_problem(kind: str, options: Mapping[str, object]) -> str | None:
    """Options that a grader found by `grader_problem` lacks, as far as its source tells, or that a built-in one
    refuses."""
    known = GRADERS[kind].options if kind in GRADERS else _parameters(_definition(kind))
    if known is None or not (unknown := sorted(set(options) - set(known))):
        return value_problem(kind, options) if kind in GRADERS else None
    what = "options" if kind in GRADERS else "parameters"
    near = difflib.get_close_matches(unknown[0], known, n=1)
    return f"{kind!r} has no option {', '.join(unknown)}; its {what} are: {', '.join(known) or 'none'}" + (
        f"; did you mean {near[0]!r}?" if near else ""
    )


def shown_grader(kind: str, options: Mapping[str, object]) -> str:
    """A grader as `check` shows it: its kind, the signature of the user's as it is written, options it has and gets."""
    found = _definition(kind)
    has = ", ".join(GRADERS[kind].options if kind in GRADERS else _parameters(found) or ()) or "none"
    of = f"({ast.unparse(found.args)})" if isinstance(found, FUNCTIONS) else f" (options it has: {has})"
    given = ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items()) or "none"
    return f"{kind}{of}; options set: {given}"


def parse_options(pairs: Sequence[str]) -> dict[str, bool | int | float | str]:
    """Options of a judge from KEY=VALUE texts; a value is a number, true, false, or text. ValueError without a "="."""
    found = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not key or not sign:
            raise ValueError(f"option {pair!r} of the judge has no value; write KEY=VALUE, such as rel_tol=0.01")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        found[key] = parsed if isinstance(parsed, bool | int | float) else value
    return found


def _definition(kind: str) -> Definition | None:
    """The function or class of a grader, by its source; None for one of ours, and where only running it would tell."""
    place, _, name = kind.rpartition(":")
    file = None if kind in GRADERS else Path(place) if place.endswith(".py") else _source_of(place)
    if file is None:
        return None
    found = [node for node in ast.parse(file.read_bytes()).body if getattr(node, "name", None) == name]
    return found[-1] if found and not (isinstance(found[-1], FUNCTIONS) and found[-1].decorator_list) else None


def _source_of(module: str) -> Path | None:
    spec = _spec_of(module)
    return Path(spec.origin) if spec is not None and (spec.origin or "").endswith(".py") else None


def _parameters(found: Definition | None) -> list[str] | None:
    """The parameters by which options can be given; None where the source does not tell them all."""
    if isinstance(found, ast.ClassDef):
        made = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        if not made:  # a dataclass, or an inherited one
            fields = [node.target.id for node in found.body if isinstance(node, ast.AnnAssign)]
            return None if found.bases else fields
        found = made[-1]
    if found is None or found.args.kwarg is not None:
        return None
    return [argument.arg for argument in (*found.args.args, *found.args.kwonlyargs) if argument.arg != "self"]


def code_problem(module: str, name: str, what: str = "function") -> str | None:
    """The reason why Python would not find `name`, a function or class, in a module of this name; None if it would."""
    spec = _spec_of(module)
    if spec is None:
        or_file = f", or file.py:{name}" if what == "function" else ""
        return f"there is no module {module!r}; give one that Python finds from here{or_file}"
    if spec.origin is None:
        return f"{module!r} is a folder without code; name a module in it"
    return _source_problem(Path(spec.origin), name, what) if spec.origin.endswith(".py") else None


def _spec_of(module: str) -> importlib.machinery.ModuleSpec | None:
    """The place where Python would find a module; None if it would not.

    Its parents are walked by their folders: `find_spec` would import them.
    """
    first, *rest = module.split(".")
    if first == __name__.partition(".")[0]:  # ours, which may have moved; importing its parents runs no foreign code
        try:
            return importlib.util.find_spec(module)
        except ModuleNotFoundError:
            return None
    # The ranks of a job run with the current folder on their path; this process may not.
    spec = importlib.util.find_spec(first) if first else None
    spec = spec or importlib.machinery.PathFinder.find_spec(first, [str(Path.cwd())])
    path = first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            break
        path = f"{path}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(path, list(spec.submodule_search_locations))
    return spec if path == module else None


def _source_problem(file: Path, name: str, what: str = "function") -> str | None:
    """Complains if a file's source does not bind `name` at top level, as far as that can be read from it."""
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        return f"{file} is no Python source: {error or type(error).__name__}"
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
    bound = _bound_names(tree)
    if name in bound or "*" in bound:
        return _constant_problem(file, tree, name, what)
    near = difflib.get_close_matches(name, sorted(bound), n=1)
    return f"{file} has no {what} {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _constant_problem(file: Path, tree: ast.Module, name: str, what: str) -> str | None:
    """Complains if a file binds `name` to a plain value and to nothing else; None if it may be a function or class."""
    bound = [node for node in tree.body if name in _bound_names(ast.Module([node], []))]
    values = [node.value for node in bound if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]
    if not values or len(values) < len(bound):
        return None
    return f"{file}: {name} is {ast.unparse(values[-1])[:80]}, and a {what} is needed"


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
