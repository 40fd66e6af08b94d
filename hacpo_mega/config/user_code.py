"""The user's own code that a configuration names, "FILE.py:name" or "module:name": found, judged by source, loaded.

`check` runs none of it: a module is looked for where Python would, and its source is parsed for the name and the
signature. Paths count from the current folder. `eval` and `export` read a configuration that lies beside the model and
may be another person's: its keys that lead to code need --trust. Elsewhere: the call of graders, which run in processes
of their own (hacpo_grading/workers/grader_calls.py).
"""

import ast
import functools
import importlib.machinery
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hacpo_grading.graders.registry import GRADERS, value_problem
from hacpo_grading.workers import own_file
from hacpo_grading.workers.grader_signature import form_of
from hacpo_grading.workers.own_file import load_by_name
from hacpo_mega.config.tables.agents import AgentConfig
from hacpo_mega.config.tables.schema import Config, ConversationConfig, RewardConfig
from hacpo_mega.models.files.documents import did_you_mean

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# Engine arguments that are numbers and switches of memory, batches and schedules, by any value of these types.
ENGINE_NUMBERS = frozenset(
    (
        "async_scheduling",
        "block_size",
        "cpu_offload_gb",
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "disable_hybrid_kv_cache_manager",
        "disable_sliding_window",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "long_prefill_token_threshold",
        "max_logprobs",
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "max_num_seqs",
        "num_gpu_blocks_override",
    )
)
ENGINE_WORDS = frozenset(("kv_cache_dtype", "quantization"))  # which vLLM looks up among its own
# Executes the named code in a process of its own, and writes each name to a pipe; an empty line is the end. The
# loader is run by its file: importing its package takes a second.
TRIAL = """
import importlib.util, json, os, sys
pipe, path, loader, *names = sys.argv[1:]
sys.path[:] = json.loads(path)
spec = importlib.util.spec_from_file_location("own_file", loader)
own_file = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own_file)
pid = os.getpid()
for name in names:
    os.write(int(pipe), f"{name}\\n".encode())
    try:
        own_file.own_module(name.rpartition(":")[0], "own_code")
    except BaseException:
        pass  # the run's own processes say it
    if os.getpid() != pid:
        os._exit(0)  # a child that the file has forked
os.write(int(pipe), b"\\n")
os._exit(0)
"""
TRIAL_S = 120.0
ENVIRONMENTS = {
    "calculator": "hacpo_mega.conversations.builtin:Calculator",
    "repair": "hacpo_mega.conversations.builtin:Repair",
    "relay": "hacpo_mega.conversations.builtin:Relay",
    "number_game": "hacpo_mega.conversations.builtin:NumberGame",
}
TRIAL_BYTES = 1 << 16
# Functions of [algorithm]: the record that each is given alone, and its arguments in version 0.2, which are taken until
# version 0.4: what is called with which follows from its parameters (`_form`).
RECORDS = {"advantages": "Judged", "objective": "PackedAnswers"}
ARGUMENTS = {
    "advantages": ("rewards_PNG", "capability_N", "learner"),
    "objective": ("log_ratio_B", "advantage_B", "is_self_B", "update_index"),
}


def grader_problem(kind: str, options: Mapping[str, object] = MappingProxyType({})) -> str | None:
    """The problem of a reward kind, or None; `options` are passed to it as well."""
    place, colon, name = kind.rpartition(":")
    if kind in GRADERS:
        return None
    if not colon:
        return (
            f"{kind!r} is unknown; known: {', '.join(GRADERS)}, or your own as module:function or file.py:function"
            f"{did_you_mean(kind, GRADERS, cutoff=0.5)}"
        )
    if not place or not name.isidentifier():
        return f"{kind!r} is no grader; write module:function or file.py:function"
    definition, problem = _definition(kind)
    return problem or (definition and _call_problem(kind, definition, options))


def _call_problem(kind: str, definition: Definition, options: Mapping[str, object]) -> str | None:
    """The reason why a grader cannot be called, by its source; a worker inspects the function itself."""
    if isinstance(definition, ast.ClassDef):
        may_call = definition.bases or definition.decorator_list or "__call__" in _bound_names(definition.body)
        return None if may_call else f"{kind!r} is a class without __call__, and a grader is called"
    try:
        form_of(_signature(definition.args, options))
    except ValueError:
        return (
            f"{kind!r} takes ({ast.unparse(definition.args)}), and a grader is called with (prompt, answer, gold), or "
            "by name where it takes answer, answers, TRL's completions, or verl's solution_str and ground_truth"
        )
    return None


def _signature(takes: ast.arguments, without: Collection[str] | None = None) -> inspect.Signature:
    """The parameters of a function in source, without keyword-only ones named in `without` (None: without any).

    The value of a default is not that of the function.
    """
    kinds = inspect.Parameter
    fixed = [(argument, kinds.POSITIONAL_ONLY) for argument in takes.posonlyargs]
    fixed += [(argument, kinds.POSITIONAL_OR_KEYWORD) for argument in takes.args]
    defaults = [kinds.empty] * (len(fixed) - len(takes.defaults)) + takes.defaults
    found = [kinds(name.arg, kind, default=default) for (name, kind), default in zip(fixed, defaults)]
    found += [kinds(takes.vararg.arg, kinds.VAR_POSITIONAL)] if takes.vararg else []
    for name, default in zip(takes.kwonlyargs, takes.kw_defaults):
        if without is not None and name.arg not in without:
            found.append(kinds(name.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else default))
    return inspect.Signature(found)


def function_problem(key: str, name: str) -> str | None:
    """The reason why a function cannot be algorithm.advantages or algorithm.objective (`key`), by its source; None if
    it can, or if only its call would tell."""
    definition, problem = _definition(name)
    if not isinstance(definition, FUNCTIONS) or _form(key, _signature(definition.args)):
        return problem
    takes = len(definition.args.posonlyargs) + len(definition.args.args)
    return f"{name!r} takes {takes} arguments; {_expected(key)}"


@functools.lru_cache(maxsize=64)
def takes_record(key: str, name: str) -> bool:
    """True if the function of that name is called with the record alone, False for the arguments of version 0.2.

    ValueError, one line, for one that takes neither.
    """
    function = named_function(name)
    try:
        signature = inspect.signature(function)
    except ValueError:  # one in C tells nothing of itself
        return False
    if (form := _form(key, signature)) is None:
        raise ValueError(f"algorithm.{key}: {name!r} takes {signature}; {_expected(key)}")
    return form == "record"


def _form(key: str, signature: inspect.Signature) -> str | None:
    """Form of the call of a function, by the numbers of arguments that it takes; None for one that takes neither."""
    return "arguments" if _takes(signature, len(ARGUMENTS[key])) else "record" if _takes(signature, 1) else None


def _expected(key: str) -> str:
    return (
        f"algorithm.{key} takes one, the record {RECORDS[key]} of hacpo_mega.algorithm (docs/guide/methods.md), or as "
        f"before {', '.join(ARGUMENTS[key])}"
    )


def own_code_problem(name: str, num_arguments: int | None = None, what: str = "function") -> str | None:
    """The reason why a function, or class, of the user's cannot be called with so many arguments, or None."""
    definition, problem = _definition(name, what)
    takes = definition.args if isinstance(definition, FUNCTIONS) else None
    if num_arguments is None or takes is None or _takes(_signature(takes), num_arguments):
        return problem
    return f"{name!r} takes {len(takes.posonlyargs) + len(takes.args)} arguments, and is given {num_arguments}"


def _takes(signature: inspect.Signature, number: int) -> bool:
    """True for a function that can be called with so many arguments by position."""
    try:
        return signature.bind(*range(number)) is not None
    except TypeError:
        return False


def tracker_problem(name: str) -> str | None:
    """The reason why a user's class is no tracker (logbook/files/trackers.py), as far as its source tells; or None."""
    definition, _ = _definition(name, "class")
    if not isinstance(definition, ast.ClassDef) or definition.bases or definition.decorator_list:
        return own_code_problem(name, num_arguments=1, what="class")
    has = _bound_names(definition.body)
    if missing := [method for method in ("log", "finish") if method not in has]:
        return f"{name!r} has no {' and no '.join(missing)}, which every tracker has (docs/guide/monitoring.md)"
    init = next((node.args for node in definition.body if getattr(node, "name", None) == "__init__"), None)
    if init is not None and _takes(_signature(init), 2):
        return None
    takes = 0 if init is None else len(init.posonlyargs) + len(init.args) - 1
    return f"{name!r} is made with {takes} arguments, and is given one, the run (docs/guide/monitoring.md)"


def environment_problem(name: str) -> str | None:
    """The reason why `name` is no environment (conversations/environment.py), as far as a class's source tells."""
    if name in ENVIRONMENTS:
        return None
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute.isidentifier():
        hint = did_you_mean(name, ENVIRONMENTS)
        return f"environment {name!r} is unknown; known: {', '.join(ENVIRONMENTS)}, or your own file.py:Class{hint}"
    definition, problem = _definition(name, "class")
    if isinstance(definition, ast.ClassDef) and not definition.bases and "reset" not in _bound_names(definition.body):
        return f"{name!r} has no method reset(**row), which begins a conversation (docs/guide/environments.md)"
    return problem


def option_problem(kind: str, options: Mapping[str, object]) -> str | None:
    """Options that a grader found by `grader_problem` lacks, as far as its source tells, or that a built-in one
    refuses."""
    known = GRADERS[kind].options if kind in GRADERS else _parameters(_definition(kind)[0])
    if known is None or not (unknown := sorted(set(options) - set(known))):
        return value_problem(kind, options) if kind in GRADERS else None
    what = "options" if kind in GRADERS else "parameters"
    near, has = did_you_mean(unknown[0], known), ", ".join(known) or "none"
    return f"{kind!r} has no option {', '.join(unknown)}; its {what} are: {has}{near}"


def shown_grader(kind: str, options: Mapping[str, object]) -> str:
    """A grader as `check` shows it: its kind, the signature of the user's as it is written, options it has and gets."""
    definition = None if kind in GRADERS else _definition(kind)[0]
    has = ", ".join(GRADERS[kind].options if kind in GRADERS else _parameters(definition) or ()) or "none"
    form = f"({ast.unparse(definition.args)})" if isinstance(definition, FUNCTIONS) else f" (options it has: {has})"
    given = ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items()) or "none"
    return f"{kind}{form}; options set: {given}"


def parse_options(pairs: Sequence[str]) -> dict[str, bool | int | float | str]:
    """Options of a judge from KEY=VALUE texts; a value is a number, true, false, or text. ValueError without a "="."""
    options = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not key or not sign:
            raise ValueError(f"option {pair!r} of the judge has no value; write KEY=VALUE, such as rel_tol=0.01")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        options[key] = parsed if isinstance(parsed, bool | int | float) else value
    return options


def _parameters(definition: Definition | None) -> list[str] | None:
    """The parameters by which options can be given; None where the source does not tell them all."""
    if isinstance(definition, ast.ClassDef):
        made = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        if not made:  # a dataclass, or an inherited one
            fields = [node.target.id for node in definition.body if isinstance(node, ast.AnnAssign)]
            return None if definition.bases else fields
        definition = made[-1]
    if definition is None or definition.args.kwarg is not None:
        return None
    return [argument.arg for argument in (*definition.args.args, *definition.args.kwonlyargs) if argument.arg != "self"]


def _definition(name: str, what: str = "function") -> tuple[Definition | None, str | None]:
    """Source node of the function or class of that name, None where only running would tell; and its problem."""
    file, problem = source_of(name, what)
    if file is None:
        return None, problem
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        return None, f"{file} is no Python source: {error or type(error).__name__}"
    except OSError as error:
        return None, f"{file} cannot be read ({error.strerror})"
    attribute, bound = name.rpartition(":")[2], _bound_names(tree.body)
    if attribute not in bound and "*" not in bound:
        return None, f"{file} has no {what} {attribute!r}{did_you_mean(attribute, sorted(bound))}"
    binding = [node for node in tree.body if attribute in _bound_names([node])]
    if binding and all(isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) for node in binding):
        value = ast.unparse(binding[-1].value)[:80]
        return None, f"{file}: {attribute} is {value}, and a {what} is needed"
    definition = binding[-1] if binding and isinstance(binding[-1], Definition) else None
    return (None if isinstance(definition, FUNCTIONS) and definition.decorator_list else definition), None


def source_of(name: str, what: str = "function") -> tuple[Path | None, str | None]:
    """The file with the source of "place:name", None if it is not Python; and the reason if there is no such place."""
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        if os.path.isfile(place):  # also for too long a name
            return Path(place), None
        is_other = "is a folder, a pipe or a device" if os.path.exists(place) else "does not exist"
        return None, f"{name[-200:]!r}: the file {place[-200:]} {is_other}"
    spec = _spec_of(place)
    if spec is None:
        or_file = f", or file.py:{attribute}" if what == "function" else ""
        return None, f"there is no module {place!r}; give one that Python finds from here{or_file}"
    if spec.origin is None:
        return None, f"{place!r} is a folder without code; name a module in it"
    return (Path(spec.origin) if spec.origin.endswith(".py") else None), None


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
    # Commands that run the code of a configuration have the current folder last on their path; this process may not.
    spec = importlib.util.find_spec(first) if first else None
    spec = spec or importlib.machinery.PathFinder.find_spec(first, [str(Path.cwd())])
    path = first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            break
        path = f"{path}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(path, list(spec.submodule_search_locations))
    return spec if path == module else None


def _bound_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that statements bind outside functions and classes; `*` for a star import."""
    names: set[str] = set()
    waiting = list(nodes)
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


def named_in(config: Config) -> tuple[str, ...]:
    """Functions that [algorithm] and [logging] name, without trackers."""
    names = (config.algorithm.advantages, config.algorithm.objective, *config.logging.metrics)
    return tuple(name for name in names if name is not None)


def require_named_functions(config: Config) -> None:
    """Executes the functions of `named_in`, before models load. ValueError, one line, for one that fails, or that
    cannot be called."""
    for name in named_in(config):
        named_function(name)
    for key in RECORDS:
        if (name := getattr(config.algorithm, key)) is not None:
            takes_record(key, name)


def unfinished_import(config: Config) -> str | None:
    """The message for named code, trackers included, whose import hangs or ends its process. The import is tried in a
    process of its own, for TRIAL_S or half of the time that ranks wait for each other."""
    own_trackers = (tracker for tracker in config.logging.trackers if ":" in tracker)
    names = tuple(dict.fromkeys(chain(named_in(config), own_trackers)))
    return _unfinished_trial(names, min(TRIAL_S, config.wait_s / 2)) if names else None


def _unfinished_trial(names: Sequence[str], limit_s: float) -> str | None:
    reader, pipe = os.pipe()
    os.set_blocking(reader, False)  # a process that the code left running may hold the other end
    command = [sys.executable, "-P", "-c", TRIAL, str(pipe), json.dumps(sys.path), own_file.__file__, *names]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = subprocess.Popen(command, pass_fds=(pipe,), process_group=0, **quiet)
    os.close(pipe)
    try:
        status = process.wait(limit_s)
        outcome = f"ends its process ({f'exit status {status}' if status >= 0 else signal.Signals(-status).name})"
    except subprocess.TimeoutExpired:
        outcome = f"has not ended after {limit_s:g} s: it waits or loops"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with open(reader, "rb", buffering=0) as stream:
        lines = (stream.read(TRIAL_BYTES) or b"").decode().splitlines()
    if not lines or not lines[-1]:
        return None
    file = lines[-1].rpartition(":")[0]
    return f"{lines[-1]}: the import of {file} {outcome}; a file must come to its end, without an exit or a crash"


@functools.lru_cache(maxsize=64)
def named_function(name: str) -> Callable:
    """The function or class of that name; a file is executed once per process. ValueError, one line, where it fails."""
    try:
        function = load_by_name(name, "own_code")
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name}: {type(error).__name__} while it was loaded: {error}".splitlines()[0]) from error
    if not callable(function):
        raise ValueError(f"{name} is a {type(function).__name__}, and a function is needed")
    return function


def code_of_reward(reward: RewardConfig, kind: str | None) -> Iterator[str]:
    """The keys by which judging would run code; `kind` is the grader that the user names, None where he names none.

    A program that an answer is runs in the sandbox; without it, it is code, too. A judge behind a server is no code,
    but it sends answers, and the key that a variable of this machine holds, to where the configuration says. Options of
    another kind are not read.
    """
    for key, grader in reward.graders.items():
        if kind not in (None, grader.kind):
            continue
        builtin = GRADERS.get(grader.kind)
        if builtin.asks_server if builtin is not None else kind is None:
            yield _shown(f"{key}.kind", grader.kind)
        if grader.options.get("isolated", True) is not True:
            yield _shown(f"{key}.options.isolated", grader.options["isolated"])


def code_of_model(agent: AgentConfig) -> Iterator[str]:
    """The keys by which reading an agent's folder would run code."""
    if agent.trust_remote_code:
        yield _shown(f"agents.{agent.name}.trust_remote_code", True)


def code_of_engine(agent: AgentConfig) -> Iterator[str]:
    """The keys of an agent's engine arguments that might run code."""
    for key, value in agent.vllm.items():
        is_number = key in ENGINE_NUMBERS and isinstance(value, bool | int | float)
        if not is_number and not (key in ENGINE_WORDS and isinstance(value, str) and value.isidentifier()):
            yield _shown(f"agents.{agent.name}.vllm.{key}", value)


def code_of_environment(conversation: ConversationConfig) -> Iterator[str]:
    """The key by which playing conversations would run code of the user's."""
    if conversation.environment is not None and conversation.environment not in ENVIRONMENTS:
        yield _shown("conversation.environment", conversation.environment)


def require_trust(named: Iterable[str], file: Path, *, trusted: bool, instead: str = "") -> None:
    """ValueError, one line, for keys of `file` that lead to code, unless its maker is trusted."""
    if not trusted and (keys := ", ".join(named)):
        raise ValueError(
            f"{file}: {keys}: their code is not run, since the file lies beside a model and is not your own "
            f"configuration. {instead}--trust takes it as it is, if you trust the maker of this run"
        )


def _shown(key: str, value: Any) -> str:
    text = "a table" if isinstance(value, Mapping) else str(value).lower() if isinstance(value, bool) else ascii(value)
    return f"{ascii(key)[1:-1]} = {text[:80]}"
