"""Writes the generated pages of this folder (PAGES) from the code: `make reference`.

tests/unit/commands/test_reference.py holds the pages and the code equal. Nothing here loads torch.
"""

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from hacpo_mega.cli.app import app
from hacpo_mega.config.describe import FieldDescription, describe_fields
from hacpo_mega.config.tables.algorithm import PRESETS, AlgorithmConfig
from hacpo_mega.evaluation.keys import EvaluationTable
from hacpo_mega.models.families.families import FAMILIES
from hacpo_mega.models.families.family import Family

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NOTE = "Generated from the code by `make reference`; do not edit."


def configuration() -> str:
    """Every key of a run's TOML file, one table for each section; of the algorithm, both presets side by side."""
    parts = ["# Configuration", NOTE, "`hacpo-mega config [KEY]` prints the same. `NAME` stands for a name of yours."]
    described = list(describe_fields())
    for section in dict.fromkeys(field.section for field in described):
        fields = [field for field in described if field.section == section]
        heads = [f"preset {preset}" for preset in PRESETS] if section == "algorithm" else ["default"]
        parts.append(f"## {f'[{section}]' if section else 'Before any table'}")
        parts.append(_table(["key", "value", *heads, "what it is"], (_field_row(field) for field in fields)))
    return _page(parts)


def commands() -> str:
    """Usage, arguments and options of every command."""
    root = typer.main.get_command(app)
    parts = ["# Commands", NOTE, "`hacpo-mega COMMAND --help` prints the same. `launch/local.sh CONFIG` is `train`."]
    overview = ([f"`{name}`", _first_line(command)] for name, command in _commands(root))
    parts.append(_table(["command", "what it does"], overview))
    for name, command in _commands(root):
        parts += [f"## {name}", " ".join((command.help or "").split())]
        parts.append(_table(["", "what it is"], (_parameter_row(each) for each in command.params)))
        if name == "eval":
            fields = ([f"`{f.key}`", f.allowed, f.default, f.sentence] for f in describe_fields(EvaluationTable))
            parts.append(_table(["key", "value", "default", "what it is"], fields))
    return _page(parts)


def metrics() -> str:
    """The docstrings that list all names: of metrics, of what becomes of answers, of the fields of rollouts/."""
    text = _docstring("logbook/files/metrics.py")
    more = "[Monitoring](../guide/monitoring.md) says which to watch."
    blocks = [f"```\n{block}\n```" if block.startswith("    ") else block for block in text.split("\n\n")]
    parts = {
        "Counts below view": _docstring("records.py", "ReencodingCounts"),
        "Lines of rollouts": _docstring("logbook/files/rollout_log.py"),
    }
    added = (f"## {name}\n\n```\n{text}\n```" for name, text in parts.items())
    return _page(["# Metrics", NOTE, more, *blocks, *added])


def _docstring(file: str, name: str | None = None) -> str:
    """The docstring of a file of the product, or of a class in it."""
    tree = ast.parse((ROOT / "hacpo_mega" / file).read_text(encoding="utf-8"))
    found = tree if name is None else next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    return ast.get_docstring(found) or ""


def models() -> str:
    """The records of models/families/families.py: what a folder may ask for, and which layouts it can have."""
    more = (
        "A folder is read by its `config.json`: a field that its family does not know, or a value that is not "
        "supported, is a refusal that names it."
    )
    rows = (
        [
            ", ".join(f"`{name}`" for name in (family.model_type, family.architecture, family.image_class) if name),
            family.models,
            ", ".join(family.rope_kinds),
            WINDOWS[family.windows],
            f"heads{_columns(family)}{', key/value heads' * family.whole_qk_norm}",
            "the experts" if family.experts is not None else "",
            f"{TE[family.windows]}`local`" if family.fits_te else "`local`",
        ]
        for family in FAMILIES.values()
    )
    head = [
        "`model_type`, class",
        "models",
        "rotary scaling",
        "sliding window",
        "`tp` divides",
        "`ep` divides",
        "`transformer`",
    ]
    below = (
        "All of them: any `pp` that the layers can be dealt out to, sequence parallelism with `tp` above 1, data "
        "and context parallelism, virtual pipelines, LoRA, tied and untied embeddings; with delta nets no context "
        "parallelism. Where the table does not name key/value heads, `tp` may be a multiple of them, too; query, key "
        "and value together must have rows for every rank. `hacpo-mega check` says the nearest layout of a model that "
        "cannot have what is asked."
    )
    return _page(["# Models and layouts", NOTE, more, _table(head, rows), below])


def _columns(family: Family) -> str:
    heads, experts = ", key heads of delta nets" * (family.delta_net is not None), family.experts
    if experts is None:
        return f"{heads}, feed-forward columns"
    if experts.shared is None:
        return heads
    return f"{heads}, columns of {'feed-forwards and ' * ('dense_layers' in experts.config_names)}shared experts"


# By Family.windows.
TE = {"none": "`te`, ", "all": "`te` without a window, ", "some": "", "pattern": ""}
WINDOWS = {"none": "refused", "all": "all layers or none", "some": "some layers, with angles of their own",
           "pattern": "every second layer"}  # fmt: skip

GRADING = "../packages/hacpo_grading/hacpo_grading"
# What programs may import, by the file that has it; a name of a class brings its public methods.
API = {
    "hacpo_mega": {"config/load.py": ["load_config"], "jobs/from_python.py": ["train", "TrainedRun", "RunFailed"]},
    "hacpo_mega, under torchrun or srun": {"trainer/trainer.py": ["Trainer"]},
    "hacpo_mega.grading": {
        f"{GRADING}/workers/grader_calls.py": ["Unjudged"],
        f"{GRADING}/graders/graders.py": ["length_penalised", "requiring_format"],
        f"{GRADING}/judge.py": ["Judge"],
        f"{GRADING}/judgement.py": ["Asked"],
    },
}


def api() -> str:
    """Signatures and docstrings of what programs may import, and a program that a test runs."""
    example = (HERE / "example.py").read_text(encoding="utf-8").strip()
    parts = ["# Python", NOTE, f"```python\n{example}\n```"]
    for module, files in API.items():
        parts.append(f"## {module}")
        for file, names in files.items():
            tree = ast.parse((ROOT / "hacpo_mega" / file).read_text(encoding="utf-8"))
            found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            parts += [_described(found[name], f"{name}") for name in names]
    return _page(parts)


def _described(node: ast.FunctionDef | ast.ClassDef, name: str) -> str:
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef)] if isinstance(node, ast.ClassDef) else []
    made = next((method for method in methods if method.name == "__init__"), node)
    named = ast.unparse(made.args).removeprefix("self").removeprefix(", ") if hasattr(made, "args") else None
    arguments = "" if named is None or _is_property(made) else f"({named})"
    shown = [method for method in methods if not method.name.startswith("_")]
    text = "\n\n".join(filter(None, (ast.get_docstring(node), made is not node and ast.get_docstring(made))))
    below = [_described(method, f"{name}.{method.name}") for method in shown]
    return "\n\n".join([f"### {name}", f"```\n{name}{arguments}\n\n{text}\n```", *below])


def _is_property(node: ast.AST) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "property" for mark in getattr(node, "decorator_list", ()))


Page = Callable[[], str]


def own_methods() -> str:
    """The records that functions of the user's get, and the examples in configs/methods."""
    more = "Arguments of `algorithm.advantages` and `algorithm.objective` ([guide](../guide/methods.md#your-own))."
    parts = ["# Methods of your own", NOTE, more]
    for file in ("judged", "answers"):
        tree = ast.parse((ROOT / "hacpo_mega" / "algorithm" / f"{file}.py").read_text(encoding="utf-8"))
        record = next(node for node in tree.body if isinstance(node, ast.ClassDef))
        parts += [f"## `{record.name}`", f"```\n{ast.get_docstring(record)}\n```"]
        asked = (node for node in record.body if isinstance(node, ast.FunctionDef))
        rows = ([f"`{node.name}`", " ".join((ast.get_docstring(node) or "").split())] for node in asked)
        if table := _table(["also has", "what it is"], rows) if file == "answers" else "":
            parts.append(table)
    for path in sorted((ROOT / "configs" / "methods").glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        parts += [f"## `{path.relative_to(ROOT).as_posix()}`", f"```\n{text}\n```"]
    return _page(parts)


PAGES: dict[str, Page] = {
    "configuration.md": configuration,
    "commands.md": commands,
    "metrics.md": metrics,
    "api.md": api,
    "models.md": models,
    "own-methods.md": own_methods,
}


def _field_row(field: FieldDescription) -> list[str]:
    of_presets = (json.dumps(getattr(AlgorithmConfig(preset=preset), field.name, None)) for preset in PRESETS)
    found = list(of_presets) if field.section == "algorithm" else [field.default]
    defaults = [value.replace("null", "not given") for value in found]
    return [f"`{field.name}`", field.allowed, *defaults, field.sentence]


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Typer's own copies of click's groups and commands, which it does not export."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        elif not command.hidden:
            yield f"{prefix}{name}", command


def _parameter_row(parameter: Any) -> list[str]:
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    is_option = parameter.param_type_name == "option"
    shown = names if is_option else str(parameter.metavar or parameter.name)
    default = parameter.default
    told = f" Default: {default}." if is_option and default not in (None, False, ()) and not callable(default) else ""
    return [f"`{shown}`", " ".join((getattr(parameter, "help", None) or "").split()) + told]


def _first_line(command: Any) -> str:
    return " ".join((command.help or "").split("\n\n")[0].split())


def _table(head: list[str], rows: Iterator[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")


def _page(parts: list[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    for file, page in PAGES.items():
        (HERE / file).write_text(page(), encoding="utf-8")
