"""Import rules: rooms on floors, one door per heavy library, few places that collectives may hang in.

Every rule is a function from parsed files to complaints, and is shown here to catch a file that breaks it. Rules for
a single file are in test_code_rules.py.
"""

import ast
import collections
import subprocess
import symtable
import sys
from collections.abc import Iterator

import pytest
from house_rules import BESIDE, ROOT, Complaints, Rule, Source, Sources, functions, read_limits, read_sources

# A folder of hacpo_mega is a room, and so is a package beside it; these are the two files of the lobby.
LOBBY = {"records.py": "records", "__init__.py": "cli"}
# Lowest first. A room may use the rooms on lower floors, and nothing beside it. The lab, which studies the product, is
# above all of it, so that nothing of the product imports it.
FLOORS = (
    ("hacpo_grading",),
    ("models", "records"),
    ("memory",),
    ("config",),
    ("algorithm", "checkpoint", "cluster", "data", "samples"),
    ("grading", "megatron", "preflight", "rollout"),
    ("conversations", "logbook"),
    ("agent", "evaluation", "jobs", "report"),
    ("commands", "trainer", "watch"),
    ("cli",),
    ("hacpo_lab",),
)
OURS = ("hacpo_mega", "hacpo_lab", "hacpo_grading", "hacpo_kernels")
MAX_ROOMS, MAX_FLOORS = 27, 11
# The most parts (folders, and files beside them) of a large room, and the most pairs of which one imports the other.
PARTS = {
    "megatron": (6, 13),
    "config": (8, 12),
    "models": (5, 6),
    "rollout": (7, 8),
    "hacpo_grading": (6, 7),
    "cluster": (16, 26),
}
MAX_FILES = 14  # of Python in a folder of the product
CLI = "hacpo_mega/cli/"
LAB = "packages/hacpo_lab/hacpo_lab/"
COMMANDS = (CLI, f"{LAB}commands/")
# Command files that the others may import; beyond these only app.py, which registers them, imports another.
SHARED_BY_COMMANDS = (f"{LAB}commands/ranks.py", "hacpo_mega/cli/start.py")
# Where a heavy library may be named at all.
DOORS = {
    "megatron": ("hacpo_mega/megatron/",),
    **dict.fromkeys(("transformer_engine", "apex", "amp_C"), ("hacpo_mega/megatron/",)),
    # and where an experiment's server imports it for the ranks that it forks
    "vllm": ("hacpo_mega/rollout/", f"{LAB}preloaded.py"),
    "triton": ("kernels/hacpo_kernels/",),
    "tensorboard": ("hacpo_mega/logbook/files/metrics.py",),
    "matplotlib": ("hacpo_mega/report/", f"{LAB}throughput/figure.py"),
    "wandb": ("hacpo_mega/logbook/files/trackers.py",),
    "trackio": ("hacpo_mega/logbook/files/trackers.py",),
    "modelopt": ("hacpo_mega/commands/quantize.py",),
    "typer": COMMANDS,
    "starlette": ("hacpo_mega/watch/",),
    "uvicorn": ("hacpo_mega/watch/",),
}
# A hang has these suspects. In the kernels it is the vocabulary-parallel log-prob, over its tensor-parallel group.
COLLECTIVES = (
    "hacpo_mega/cluster/",
    "hacpo_mega/rollout/",
    "hacpo_mega/megatron/",
    "hacpo_mega/preflight/meeting.py",
    "kernels/hacpo_kernels/",
)
# A grader of answers needs no trainer, and no model except one behind a server.
UNKNOWN_TO_GRADERS = {"hacpo_mega", "hacpo_kernels", "hacpo_lab", "torch", "transformers", "vllm", "megatron"}
ALGORITHM_MAY_IMPORT = {"torch", "math", "typing", "dataclasses", "collections", "hacpo_kernels"}
# Files that load code by a name the user gave: a grader of his own, a tracker that he has installed.
LOADS_BY_NAME = (
    "hacpo_mega/grading/__init__.py",
    "packages/hacpo_grading/hacpo_grading/workers/own_file.py",
    "hacpo_mega/logbook/files/trackers.py",
    "hacpo_mega/data/reading/tables.py",
)


def room_of(path: str) -> str | None:
    folder, _, rest = inside(path).partition("/")
    room = folder if rest else LOBBY.get(folder)
    return room if any(room in rooms for rooms in FLOORS) else None


def inside(path: str) -> str:
    """The path in the product, or that of a package beside it as if it were a room: hacpo_lab/chaos/faults.py."""
    return BESIDE.sub("", path).removeprefix("hacpo_mega/")


def own_imports(sources: Sources) -> Iterator[tuple[Source, int, str, Source]]:
    """(file, line, imported name, file of ours that it leads to: the module itself, or the one that holds the name)."""
    by_module = {source.module: source for source in sources}
    for source in sources:
        for line, name in source.imports():
            if target := by_module.get(name, by_module.get(name.rpartition(".")[0])):
                yield source, line, name, target


def every_file_has_a_room(sources: Sources) -> Complaints:
    for source in sources:
        if not source.path.startswith("kernels/") and room_of(source.path) is None:
            yield f"{source.path}: belongs to no room of FLOORS in tests/test_architecture.py; give it one"


def imported_names_exist(sources: Sources) -> Complaints:
    """Inside functions, too: a name that has moved shows there in the night's tests at the earliest."""
    there = {source.module for source in sources}
    there |= {f"{source.module}.{name}" for source in sources for name in names_of(source)}
    for source in sources:
        for line, name in source.imports():
            if name.partition(".")[0] in OURS and name not in there:
                yield f"{source.path}:{line}: imports {name}, which is not there"


def names_of(source: Source) -> set[str]:
    """Names that the module has when it is imported, and those that it looks up when they are asked for."""
    symbols = symtable.symtable(source.text, source.path, "exec").get_symbols()
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    if "__getattr__" not in names:
        return names
    return names | {str(node.value) for node in source.nodes if isinstance(node, ast.Constant)}


def imports_go_down(sources: Sources) -> Complaints:
    floor = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
    for source, line, name, target in own_imports(sources):
        here, there = room_of(source.path), room_of(target.path)
        if here and there and here != there and floor[there] >= floor[here]:
            yield f"{source.path}:{line}: room {here!r} may not import {name} of room {there!r}"


def commands_are_strangers(sources: Sources) -> Complaints:
    registering = (f"{CLI}app.py", f"{CLI}__init__.py", f"{CLI}__main__.py")
    for source, line, name, target in own_imports(sources):
        among_commands = source.lies_in(COMMANDS) and target.lies_in(COMMANDS)
        if among_commands and source.path not in registering and target.path not in (source.path, *SHARED_BY_COMMANDS):
            yield f"{source.path}:{line}: no command file imports another, but this one {name}"


def imports_have_no_circle(sources: Sources) -> Complaints:
    graph = {source.module: set() for source in sources}
    for source, _, _, target in own_imports(sources):
        graph[source.module] |= {target.module} - {source.module}
    while leaves := [module for module, needs in graph.items() if not needs & graph.keys()]:
        for module in leaves:
            del graph[module]
    if graph:
        yield f"import circle among {', '.join(sorted(graph))}"


def parts_of_a_room_have_no_circle(sources: Sources) -> Complaints:
    """The parts are a room's folders and the files beside them: a reader takes one after the other."""
    graph = parts_of_rooms(sources)
    while leaves := [part for part, needs in graph.items() if not needs & graph.keys()]:
        for part in leaves:
            del graph[part]
    if graph:
        yield f"import circle among {', '.join(sorted('/'.join(part) for part in graph))}"


def large_rooms_have_few_parts(sources: Sources) -> Complaints:
    """A reader holds a handful of parts in mind, and the ways between them."""
    graph = parts_of_rooms(sources)
    for room, (most_parts, most_pairs) in PARTS.items():
        parts = [part for part in graph if part[0] == room]
        pairs = sum(len(graph[part]) for part in parts)
        if len(parts) > most_parts or pairs > most_pairs:
            yield f"room {room!r}: {len(parts)} parts, {pairs} pairs that import; at most {most_parts} and {most_pairs}"


def parts_of_rooms(sources: Sources) -> dict[tuple[str, str], set[tuple[str, str]]]:
    """By part (`part_of`), the other parts of its room that it imports."""
    graph = {part: set() for source in sources if (part := part_of(source.path))}
    for source, _, _, target in own_imports(sources):
        here, there = part_of(source.path), part_of(target.path)
        if here and there and here[0] == there[0] and here != there:
            graph[here].add(there)
    return graph


def part_of(path: str) -> tuple[str, str] | None:
    """(room, its folder or file) of a file; None of a room's __init__.py, which names what the room offers."""
    room, _, rest = inside(path).partition("/")
    inner = rest.partition("/")[0]
    return (room, inner) if room_of(path) and inner not in ("", "__init__.py") else None


def folders_are_small(sources: Sources) -> Complaints:
    folders = collections.Counter(source.path.rpartition("/")[0] for source in sources if room_of(source.path))
    for folder, count in folders.items():
        if count > MAX_FILES:
            yield f"{folder}: {count} files, more than {MAX_FILES}; give it folders of its own"


def rooms_keep_their_net_lines(sources: Sources) -> Complaints:
    """A room grows only where its number in tests/limits.toml is raised in the same commit."""
    net: collections.Counter[str] = collections.Counter()
    for source in sources:
        net[room_of(source.path) or source.path.split("/")[1]] += source.net_lines()
    beside_lab = net.total() - net["hacpo_lab"] - net["hacpo_kernels"] - net["hacpo_grading"]
    for room, lines in net.items():
        if lines > (most := read_limits().net_lines.get(room, 0)):
            yield f"room {room!r}: {lines} net lines, more than {most}; the product has {beside_lab}"


def a_file_has_more_than_one_importer(sources: Sources) -> Complaints:
    """A part of one thought stands in the file that has the thought. A module read by nobody else is no door."""
    for path, importer in sorted(with_one_importer(sources).items()):
        if path not in read_limits().one_importer:
            yield f"{path}: only {importer}, of its own room, imports it; it belongs into that file"


def with_one_importer(sources: Sources) -> dict[str, str]:
    """By file of the product, the file that alone imports it, where that is a file of the same room.

    A room's __init__.py says what others may have of it, and cli/app.py only registers the commands.
    """
    importers: dict[str, set[str]] = {}
    for source, _, _, target in own_imports(sources):
        if source.path != target.path and target.path.startswith("hacpo_mega/"):
            importers.setdefault(target.path, set()).add(source.path)
    found = {}
    for path, (importer, *others) in importers.items():
        is_face = path.endswith("__init__.py") or importer.endswith("__init__.py") or importer == f"{CLI}app.py"
        if not others and not is_face and room_of(path) == room_of(importer):
            found[path] = importer
    return found


def kernels_know_nothing_of_us(sources: Sources) -> Complaints:
    for source in sources:
        for line, name in source.imports():
            if source.path.startswith("kernels/") and name.split(".")[0] == "hacpo_mega":
                yield f"{source.path}:{line}: hacpo_kernels stands alone, but imports {name}"


def graders_know_nothing_of_us(sources: Sources) -> Complaints:
    for source in sources:
        for line, name in source.imports():
            if source.path.startswith("packages/hacpo_grading/") and name.split(".")[0] in UNKNOWN_TO_GRADERS:
                yield f"{source.path}:{line}: hacpo_grading stands alone, without models, but imports {name}"


def one_door_per_library(sources: Sources) -> Complaints:
    for source in sources:
        for line, name in source.imports():
            library = name.split(".")[0]
            if library in DOORS and not source.lies_in(DOORS[library]):
                yield f"{source.path}:{line}: {library} has its door at {', '.join(DOORS[library])}"


def collectives_have_few_suspects(sources: Sources) -> Complaints:
    for source in sources:
        for line, name in source.imports():
            starts_processes = name.startswith(("torch.distributed.launcher", "torch.distributed.elastic"))
            speaks = f"{name}.".startswith("torch.distributed.") and not starts_processes
            if speaks and not source.lies_in(COLLECTIVES):
                yield f"{source.path}:{line}: torch.distributed outside the places where a job may hang"


def algorithm_is_the_paper(sources: Sources) -> Complaints:
    for source in sources:
        if not source.path.startswith("hacpo_mega/algorithm/"):
            continue
        for line, name in source.imports():
            ours = name.startswith(("hacpo_mega.config.", "hacpo_mega.algorithm."))
            if not ours and (name.split(".")[0] not in ALGORITHM_MAY_IMPORT or name.startswith("torch.distributed")):
                yield f"{source.path}:{line}: the algorithm is tensors and math, but imports {name}"


def imports_stand_at_the_top(sources: Sources) -> Complaints:
    for source in sources:
        if source.lies_in((*COMMANDS, "hacpo_mega/__init__.py")):
            continue
        for function in functions(source):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    yield f"{source.path}:{node.lineno}: import inside {function.name}(); only the doors may"
        for node in source.nodes:
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            by_name = called in ("__import__", "importlib.import_module", "import_module")
            if by_name and not source.lies_in(LOADS_BY_NAME):
                yield f"{source.path}:{node.lineno}: {called}() hides an import"


RULES: tuple[Rule, ...] = (
    every_file_has_a_room,
    imported_names_exist,
    imports_go_down,
    commands_are_strangers,
    imports_have_no_circle,
    parts_of_a_room_have_no_circle,
    large_rooms_have_few_parts,
    folders_are_small,
    rooms_keep_their_net_lines,
    a_file_has_more_than_one_importer,
    kernels_know_nothing_of_us,
    graders_know_nothing_of_us,
    one_door_per_library,
    collectives_have_few_suspects,
    algorithm_is_the_paper,
    imports_stand_at_the_top,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps(rule: Rule) -> None:
    complaints = list(rule(read_sources()))
    assert complaints == [], "\n" + "\n".join(complaints)


A = "hacpo_mega/agent/agent.py"
GRADING = "packages/hacpo_grading/hacpo_grading/"


BAD: tuple[tuple[Rule, dict[str, str]], ...] = (
    (every_file_has_a_room, {"hacpo_mega/elsewhere.py": ""}),
    (imported_names_exist, {A: "def f():\n    from hacpo_mega.agent.agent import other"}),
    (imported_names_exist, {f"{LAB}chaos/x.py": "PRELOAD = 'hacpo_lab.chaos.y'"}),
    (imports_go_down, {"hacpo_mega/data/x.py": "from hacpo_mega.agent.agent import Agent", A: ""}),
    (imports_go_down, {"hacpo_mega/data/x.py": "from hacpo_mega.algorithm import y", "hacpo_mega/algorithm/y.py": ""}),
    (imports_go_down, {"hacpo_mega/data/x.py": "def f():\n    import hacpo_mega.agent.agent", A: ""}),
    (imports_go_down, {"hacpo_mega/data/x.py": "from ..agent.agent import Agent", A: ""}),
    (imports_go_down, {A: "from hacpo_lab.chaos import faults", f"{LAB}chaos/faults.py": ""}),
    (imports_go_down, {"hacpo_mega/data/x.py": "PRELOAD = 'hacpo_mega.agent.agent'", A: ""}),
    (commands_are_strangers, {f"{CLI}x.py": "from hacpo_mega.cli.y import run", f"{CLI}y.py": ""}),
    (imports_have_no_circle, {"hacpo_mega/data/x.py": "from .y import b", "hacpo_mega/data/y.py": "from .x import a"}),
    (
        parts_of_a_room_have_no_circle,
        {
            "hacpo_mega/data/a/x.py": "from hacpo_mega.data.b import y",
            "hacpo_mega/data/b/y.py": "",
            "hacpo_mega/data/b/z.py": "from hacpo_mega.data.a import w",
            "hacpo_mega/data/a/w.py": "",
        },
    ),
    (large_rooms_have_few_parts, {f"hacpo_mega/models/x{number}.py": "" for number in range(6)}),
    (rooms_keep_their_net_lines, {"hacpo_mega/records.py": "x = 1\n" * 999}),
    (
        a_file_has_more_than_one_importer,
        {"hacpo_mega/data/x.py": "from hacpo_mega.data.y import z", "hacpo_mega/data/y.py": "z = 1"},
    ),
    (folders_are_small, {f"hacpo_mega/data/x{number}.py": "" for number in range(MAX_FILES + 1)}),
    (kernels_know_nothing_of_us, {"kernels/hacpo_kernels/x.py": "from hacpo_mega.config import load_config"}),
    (graders_know_nothing_of_us, {f"{GRADING}x.py": "from hacpo_mega.records import Prompt"}),
    (graders_know_nothing_of_us, {f"{GRADING}graders/x.py": "def f():\n    import torch"}),
    (graders_know_nothing_of_us, {f"{GRADING}x.py": "PRELOAD = 'hacpo_mega.config'"}),
    (folders_are_small, {f"{GRADING}graders/x{number}.py": "" for number in range(MAX_FILES + 1)}),
    (
        parts_of_a_room_have_no_circle,
        {
            f"{GRADING}a/x.py": "from hacpo_grading.b import y",
            f"{GRADING}b/y.py": "",
            f"{GRADING}b/z.py": "from hacpo_grading.a import w",
            f"{GRADING}a/w.py": "",
        },
    ),
    (one_door_per_library, {A: "from megatron.core import parallel_state"}),
    (one_door_per_library, {"hacpo_mega/agent/agent.py": "import vllm"}),
    (one_door_per_library, {"hacpo_mega/algorithm/objective.py": "import triton.language as tl"}),
    (one_door_per_library, {A: "import wandb"}),
    (one_door_per_library, {"hacpo_mega/logbook/console.py": "def f():\n    from tensorboard import program"}),
    (collectives_have_few_suspects, {A: "import torch.distributed as dist"}),
    (collectives_have_few_suspects, {A: "from torch import distributed"}),
    (algorithm_is_the_paper, {"hacpo_mega/algorithm/x.py": "import json"}),
    (algorithm_is_the_paper, {"hacpo_mega/algorithm/x.py": "import torch.distributed"}),
    (imports_stand_at_the_top, {A: "def f():\n    import json"}),
    (imports_stand_at_the_top, {A: "import importlib\nx = importlib.import_module('vllm')"}),
)


@pytest.mark.parametrize(("rule", "files"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_a_rule_catches_what_breaks_it(rule: Rule, files: dict[str, str]) -> None:
    assert len(list(rule([Source(path, text) for path, text in files.items()]))) == 1


def test_the_house_is_not_a_tower() -> None:
    folders = {path.parent.name for path in (ROOT / "hacpo_mega").glob("*/__init__.py")}
    beside = {folder.name for folder in (ROOT / "packages").iterdir()}
    assert len(FLOORS) <= MAX_FLOORS and len(folders) + 1 <= MAX_ROOMS
    assert folders | beside | {"records"} == {room for rooms in FLOORS for room in rooms}


def test_every_rule_is_shown_to_catch_something() -> None:
    assert {rule for rule, _ in BAD} == set(RULES)


def test_every_exception_is_still_needed() -> None:
    limits, alone = read_limits(), with_one_importer(read_sources())
    assert sorted(set(limits.one_importer) - alone.keys()) == []
    assert limits.one_importer == sorted(set(limits.one_importer))
    assert limits.net_lines.keys() == {room_of(s.path) or s.path.split("/")[1] for s in read_sources()}


def test_net_lines_are_those_that_compute() -> None:
    text = '"""Of\n\nk."""\n\nimport json\nfrom a import (\n    b,\n)\n\n# why\n'
    text += "x = (\n    1,  # one\n\n    # two\n    2,\n)\n"
    text += 'def f():\n    """Of j."""\n    return """a\n\n    # b"""\n'
    assert Source("hacpo_mega/data/x.py", text).net_lines() == 4 + 3


def test_rules_accept_a_file_that_keeps_them() -> None:
    good = (
        '"""What it is."""\n\nimport torch\n\nfrom hacpo_mega.config import AlgorithmConfig\n\n\n'
        'def omega() -> None:\n    """Of k and j."""\n'
    )
    sources = [
        Source("hacpo_mega/algorithm/omega.py", good),
        Source("hacpo_mega/config/__init__.py", '"""Types."""\n\nAlgorithmConfig = object\n'),
    ]
    assert [complaint for rule in RULES for complaint in rule(sources)] == []


def test_light_rooms_load_no_heavy_library() -> None:
    """One after the other in one process: the first that is not light is named with what it loads."""
    modules = ["hacpo_mega.cluster.rank_map", "hacpo_mega.config", "hacpo_mega.cli", "hacpo_mega.logbook.files.metrics"]
    files = (ROOT / "hacpo_mega" / "models").rglob("[a-z]*.py")
    modules += sorted(".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files)
    heavy = {"torch", "vllm", "megatron", "transformers", "triton", "matplotlib", "tensorflow"}
    code = f"""
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    assert not {heavy} & set(sys.modules), (module, {heavy} & set(sys.modules))
import hacpo_mega.report, hacpo_mega.watch
assert {heavy} & set(sys.modules) == {{"matplotlib"}}, {heavy} & set(sys.modules)
print("all light")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "all light\n", done.stderr
