"""The rules of the house, held over the source as it is: who may import whom, one door per heavy library, small files.

Every rule is a function from parsed files to complaints, and every rule is shown here to catch a file that breaks it.
"""

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parent.parent

# A folder of hacpo_mega is a room; these are the two files of the lobby.
LOBBY = {"records.py": "records", "__init__.py": "cli"}
# Lowest first. A room may use the rooms on lower floors, and nothing beside it. What studies the product is one wing,
# the lab, which only the command line may enter.
FLOORS = (
    ("models", "records"),
    ("memory",),
    ("config",),
    ("algorithm", "checkpoint", "cluster", "data", "samples"),
    ("grading", "megatron", "preflight", "rollout"),
    ("logbook",),
    ("agent", "evaluation", "jobs", "report"),
    ("commands", "trainer"),
    ("lab",),
    ("cli",),
)
MAX_ROOMS, MAX_FLOORS = 26, 10
CLI = "hacpo_mega/cli/"
# What several files of the command line share; beside it only app.py, which registers them, imports another.
SHARED_BY_COMMANDS = ("hacpo_mega/cli/ranks.py", "hacpo_mega/cli/start.py")
# The program itself, which is started by its name and not imported.
PROGRAM = "hacpo_mega.cli"

# Where a heavy library may be named at all.
DOORS = {
    "megatron": ("hacpo_mega/megatron/", "hacpo_mega/lab/memory_trace.py"),
    # and where an experiment's server imports it for the ranks that it forks
    "vllm": ("hacpo_mega/rollout/engine.py", "hacpo_mega/lab/experiments/preloaded.py"),
    "triton": ("kernels/hacpo_kernels/",),
    "tensorboard": ("hacpo_mega/logbook/metrics.py",),
    "matplotlib": ("hacpo_mega/report/",),
    "wandb": ("hacpo_mega/logbook/trackers.py",),
    "trackio": ("hacpo_mega/logbook/trackers.py",),
    "modelopt": ("hacpo_mega/commands/quantize.py",),
    "typer": (CLI,),
}
# A hang has these suspects. In the kernels it is the vocabulary-parallel log-prob, over its tensor-parallel group.
COLLECTIVES = (
    "hacpo_mega/cluster/",
    "hacpo_mega/rollout/",
    "hacpo_mega/megatron/",
    "hacpo_mega/preflight/meeting.py",
    "hacpo_mega/lab/memory_trace.py",
    "kernels/hacpo_kernels/",
)
# Before the start, or where a library reads its settings from there and nowhere else.
ENVIRONMENT = (
    "hacpo_mega/cluster/device.py",
    "hacpo_mega/cluster/environment.py",
    "hacpo_mega/grading/model_judge.py",  # the key of a server, by the name that the configuration gives
    "hacpo_mega/jobs/forked.py",
    "hacpo_mega/jobs/local.py",
    "hacpo_mega/cluster/place.py",
    "hacpo_mega/cluster/private_folder.py",
    "hacpo_mega/cluster/rank_map.py",
    "hacpo_mega/cluster/rendezvous.py",
    "hacpo_mega/cluster/seat.py",
    "hacpo_mega/cluster/secret.py",
    "hacpo_mega/cluster/watchdog.py",
    "hacpo_mega/megatron/platform.py",
    "hacpo_mega/rollout/engine.py",
    "hacpo_mega/rollout/host_process.py",
)
ALGORITHM_MAY_IMPORT = {"torch", "math", "typing", "dataclasses", "collections", "hacpo_kernels"}
EMPTY_WORDS = {"util", "utils", "common", "helper", "helpers", "manager", "misc"}
MAX_FILE_LINES = 350
# Files that load code by a name the user gave: a grader of his own, a tracker that he has installed.
LOADS_BY_NAME = (
    *("hacpo_mega/grading/grader_calls.py", "hacpo_mega/logbook/trackers.py", "hacpo_mega/data/hub_sets.py"),
    "hacpo_mega/config/named_function.py",
)
# Where `say` is, and what speaks to the process that started it alone.
PRINTS = (
    *("hacpo_mega/models/visible.py", "hacpo_mega/models/chat_template.py", "hacpo_mega/grading/sandbox.py"),
    "kernels/hacpo_kernels/",
)
# The one place that is given pickles, and reads them without calling anything.
READS_PICKLES = ("hacpo_mega/cluster/plain_pickle.py",)
# Modules that run what they read, or say pickles to others. Of torch's checkpoints only `save` and `load` do.
RUNS_WHAT_IT_READS = (
    *("pickle.", "_pickle.", "pickletools.", "cloudpickle.", "dill.", "joblib.", "marshal.", "shelve.", "copyreg."),
    *("multiprocessing.Pipe.", "multiprocessing.Queue.", "multiprocessing.SimpleQueue.", "multiprocessing.managers."),
    *("multiprocessing.connection.Client.", "multiprocessing.connection.Listener.", "multiprocessing.Manager."),
    *("torch.distributed.checkpoint.save.", "torch.distributed.checkpoint.load.", "torch.distributed.rpc."),
    *("torch.load.", "numpy.load.", "yaml.load.", "yaml.unsafe_load.", "code.", "codeop."),
)
OBJECT_COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object", "broadcast_object_list"),
    *("scatter_object_list", "send_object_list", "recv_object_list", "read_metadata"),
}
MAKES_CODE = (
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "yaml.load", "yaml.unsafe_load"),
    *("builtins.eval", "builtins.exec", "checkpoint.save", "checkpoint.load", "torch.hub", "runpy.run_path"),
    *(".Pipe", ".JoinableQueue", ".Manager", "connection.Listener", "connection.Client"),
)
MAX_FUNCTION_LINES = 60  # of code, docstring aside
MAX_KERNEL_LINES = 120  # a Triton kernel is one function: cutting it up would hide what stays in registers


# A file of ours in a text, such as grading/judge.py or env.sh; those of a run or a user are not ours.
MODULE_NAME = re.compile(r"hacpo_mega(\.\w+)+")
NAMED_FILE = re.compile(r"(?<![\w/.{*$-])((?:[\w.-]+/)*[a-z][\w-]*\.(?:py|md|sh|sbatch))\b(?![:\w*])")
# A link of a document to another place of the repository, relative to the document, perhaps to a heading of it.
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")


@functools.cache
def _parsed(path: str, text: str) -> ast.Module:
    return ast.parse(text, filename=path)


@dataclass(frozen=True)
class Source:
    """A parsed file; `path` is relative to the root of the repository, with slashes."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return _parsed(self.path, self.text)

    @functools.cached_property
    def module(self) -> str:
        """The dotted name; a package is named by its folder."""
        parts = PurePosixPath(self.path.removeprefix("kernels/")).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def lies_in(self, places: tuple[str, ...]) -> bool:
        return any(self.path == place or (place.endswith("/") and self.path.startswith(place)) for place in places)

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of everything imported anywhere in the file; `from a import b` gives a.b.

        A module's name in a string counts, too: whoever is given it imports it.
        """
        package = self.module if self.path.endswith("__init__.py") else self.module.rpartition(".")[0]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Constant) and MODULE_NAME.fullmatch(str(node.value)) and node.value != PROGRAM:
                yield node.lineno, node.value


Sources = list[Source]
Complaints = Iterator[str]


@functools.cache
def read_sources() -> Sources:
    files = sorted([*(ROOT / "hacpo_mega").rglob("*.py"), *(ROOT / "kernels" / "hacpo_kernels").rglob("*.py")])
    return [Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def room_of(path: str) -> str | None:
    folder, _, rest = path.removeprefix("hacpo_mega/").partition("/")
    room = folder if rest else LOBBY.get(folder)
    return room if any(room in rooms for rooms in FLOORS) else None


def own_modules(sources: Sources, imported: str) -> list[Source]:
    """The files of ours that an imported dotted name leads to: the module itself, or the one that holds the name."""
    by_module = {source.module: source for source in sources}
    return [by_module[name] for name in (imported, imported.rpartition(".")[0]) if name in by_module][:1]


def every_file_has_a_room(sources: Sources) -> Complaints:
    for source in sources:
        if source.path.startswith("hacpo_mega/") and room_of(source.path) is None:
            yield f"{source.path}: belongs to no room of FLOORS in tests/test_architecture.py; give it one"


def imports_go_down(sources: Sources) -> Complaints:
    floor = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
    for source in sources:
        here = room_of(source.path) if source.path.startswith("hacpo_mega/") else None
        for line, name in source.imports():
            for target in own_modules(sources, name):
                there = room_of(target.path) if target.path.startswith("hacpo_mega/") else None
                if here and there and here != there and floor[there] >= floor[here]:
                    yield f"{source.path}:{line}: room {here!r} may not import {name} of room {there!r}"


def commands_are_strangers(sources: Sources) -> Complaints:
    for source in sources:
        if not source.path.startswith(CLI) or source.path in (f"{CLI}app.py", f"{CLI}__init__.py", f"{CLI}__main__.py"):
            continue
        for line, name in source.imports():
            for target in own_modules(sources, name):
                if target.path.startswith(CLI) and target.path not in (source.path, *SHARED_BY_COMMANDS):
                    yield f"{source.path}:{line}: no command file imports another, but this one {name}"


def imports_have_no_circle(sources: Sources) -> Complaints:
    graph = {
        source.module: {t.module for _, name in source.imports() for t in own_modules(sources, name)} - {source.module}
        for source in sources
    }
    while leaves := [module for module, needs in graph.items() if not needs & graph.keys()]:
        for module in leaves:
            del graph[module]
    if graph:
        yield f"import circle among {', '.join(sorted(graph))}"


def kernels_know_nothing_of_us(sources: Sources) -> Complaints:
    for source in sources:
        for line, name in source.imports():
            if source.path.startswith("kernels/") and name.split(".")[0] == "hacpo_mega":
                yield f"{source.path}:{line}: hacpo_kernels stands alone, but imports {name}"


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
        if source.lies_in((CLI, "hacpo_mega/__init__.py")):
            continue
        for function in functions(source):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    yield f"{source.path}:{node.lineno}: import inside {function.name}(); only the doors may"
        for node in ast.walk(source.tree):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            by_name = called in ("__import__", "importlib.import_module", "import_module")
            if by_name and not source.lies_in(LOADS_BY_NAME):
                yield f"{source.path}:{node.lineno}: {called}() hides an import"


def nothing_is_pickled(sources: Sources) -> Complaints:
    """What a peer or a file says is bytes of a stated layout, and no text becomes code."""
    for source in sources:
        for line, name in source.imports():
            if f"{name}.".startswith(RUNS_WHAT_IT_READS) and not source.lies_in(READS_PICKLES):
                yield f"{source.path}:{line}: {name}; what is read back must not run as code"
        for node in ast.walk(source.tree):
            if found := _runs_what_it_is_given(node):
                yield f"{source.path}:{node.lineno}: {found}; what is read back must not run as code"


def _runs_what_it_is_given(node: ast.AST) -> str | None:
    """The words by which a node of the source would unpickle, or make code of a text."""
    if isinstance(node, ast.Name) and node.id in ("eval", "exec", "compile"):
        return node.id
    if isinstance(node, ast.Attribute):
        name = ast.unparse(node)
        return name if node.attr in OBJECT_COLLECTIVES or name.endswith(MAKES_CODE) else None
    if not isinstance(node, ast.Call):
        return None
    called = ast.unparse(node.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if called.rpartition(".")[2] == "load" and "torch" in called and given.get("weights_only") != "True":
        return f"{called}() without weights_only=True"
    loud = {"shell": "False", "allow_pickle": "False"}
    return next((f"{key}={given[key]}" for key, quiet in loud.items() if given.get(key, quiet) != quiet), None)


def text_is_made_visible(sources: Sources) -> Complaints:
    """Foreign text is shown, not obeyed: nobody but `say` prints, where what is quoted is written out."""
    for source in sources:
        for node in ast.walk(source.tree):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("print", "typer.echo") and not source.lies_in(PRINTS):
                yield f"{source.path}:{node.lineno}: {called}() prints as it is; models/visible.py has say()"


def environment_is_read_at_the_start(sources: Sources) -> Complaints:
    for source in sources:
        for node in ast.walk(source.tree):
            named = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
            if named and not source.lies_in(ENVIRONMENT):
                yield f"{source.path}:{node.lineno}: os.{node.attr}; numbers come from the configuration"


def nothing_is_left_undone(sources: Sources) -> Complaints:
    for source in sources:
        for number, line in enumerate(source.text.splitlines(), start=1):
            if found := re.search(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError|breakpoint\(\))", line):
                yield f"{source.path}:{number}: {found[1]}"


def files_and_functions_are_small(sources: Sources) -> Complaints:
    for source in sources:
        if (lines := len(source.text.splitlines())) > MAX_FILE_LINES:
            yield f"{source.path}: {lines} lines, more than {MAX_FILE_LINES}"
        for function in functions(source):
            is_kernel = any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)
            most = MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
            if (length := code_lines(function)) > most:
                yield f"{source.path}:{function.lineno}: {function.name}() has {length} lines, more than {most}"


def names_say_something(sources: Sources) -> Complaints:
    for source in sources:
        names = [(1, PurePosixPath(source.path).stem)]
        names += [(n.lineno, n.name) for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        for line, name in names:
            words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
            if empty := EMPTY_WORDS & {word.lower() for word in words}:
                yield f"{source.path}:{line}: {name}: {', '.join(empty)} says nothing"


def files_say_what_they_are(sources: Sources) -> Complaints:
    for source in sources:
        if source.text.strip() and not ast.get_docstring(source.tree):
            yield f"{source.path}: opens without saying what it is"


def public_things_are_described(sources: Sources) -> Complaints:
    for source in sources:
        for node in source.tree.body:
            described = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
            if described and not ast.get_docstring(node):
                yield f"{source.path}:{node.lineno}: {node.name} has no docstring"


def files_that_texts_name_exist(sources: Sources) -> Complaints:
    """Prose ages: a file that a docstring, a comment or a document names must be there."""
    known = [path.relative_to(ROOT).as_posix() for path in written_files()]
    for source in sources:
        for number, line in prose(source):
            for name in NAMED_FILE.findall(line):
                if not any(f"/{path}".endswith(f"/{name}") for path in known):
                    yield f"{source.path}:{number}: names {name}, which is not in the repository"


def prose(source: Source) -> Iterator[tuple[int, str]]:
    """(line number, text) of what is written for people: comments and docstrings of code, all of a document."""
    if not source.path.endswith(".py"):
        yield from enumerate(source.text.splitlines(), start=1)
        return
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(source.tree):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            first = node.body[0].lineno
            yield from enumerate(node.body[0].value.value.splitlines(), start=first)


def written_files() -> list[Path]:
    """What people write and read here: the repository without its environment, its runs and caches."""
    skipped = {".git", ".venv", "runs", "build", "results", "__pycache__"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not skipped & set(path.relative_to(ROOT).parts)]


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring: saying more about it is not to be punished."""
    opening = function.body[0]
    described = ast.get_docstring(function) is not None
    return function.end_lineno - function.lineno + 1 - described * (opening.end_lineno - opening.lineno + 1)


def functions(source: Source) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


Rule = Callable[[Sources], Complaints]
RULES: tuple[Rule, ...] = (
    every_file_has_a_room,
    imports_go_down,
    commands_are_strangers,
    imports_have_no_circle,
    kernels_know_nothing_of_us,
    one_door_per_library,
    collectives_have_few_suspects,
    algorithm_is_the_paper,
    imports_stand_at_the_top,
    nothing_is_pickled,
    text_is_made_visible,
    environment_is_read_at_the_start,
    nothing_is_left_undone,
    files_and_functions_are_small,
    names_say_something,
    files_say_what_they_are,
    public_things_are_described,
    files_that_texts_name_exist,
)


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


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps(rule: Rule) -> None:
    complaints = list(rule(read_sources()))
    assert complaints == [], "\n" + "\n".join(complaints)


def test_what_starts_jobs_and_measures_kernels_makes_no_code_of_what_it_reads() -> None:
    files = [*(ROOT / "launch").rglob("*.py"), *(ROOT / "kernels" / "bench").rglob("*.py")]
    sources = [Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files]
    assert sources and list(nothing_is_pickled(sources)) == []


A = "hacpo_mega/agent/agent.py"
RUNNING = (
    "dist.broadcast_object_list(name)",
    "gather = torch.distributed.all_gather_object",
    "torch.load(file)",
    "torch.load(file, weights_only=False)",
    "torch.serialization.load(file, weights_only=sure)",
    "torch.distributed.checkpoint.save(state, writer)",
    "checkpoint.load(state, checkpoint_id=folder)",
    "reader.read_metadata()",
    "np.load(file, allow_pickle=True)",
    "yaml.load(text, Loader)",
    "eval(text)",
    "values = map(eval, texts)",
    "exec(code, {})",
    "exec_ = builtins.exec",
    "compile(text, name, 'exec')",
    "subprocess.run(line, shell=True)",
    "subprocess.run(line, shell=how)",
    "os.system(line)",
    "context.Pipe()",
    "multiprocessing.connection.Listener(address)",
)
BAD: tuple[tuple[Rule, dict[str, str]], ...] = (
    (every_file_has_a_room, {"hacpo_mega/elsewhere.py": ""}),
    (imports_go_down, {"hacpo_mega/data/x.py": "from hacpo_mega.agent.agent import Agent", A: ""}),
    (imports_go_down, {"hacpo_mega/data/x.py": "from hacpo_mega.algorithm import y", "hacpo_mega/algorithm/y.py": ""}),
    (imports_go_down, {"hacpo_mega/data/x.py": "def f():\n    import hacpo_mega.agent.agent", A: ""}),
    (imports_go_down, {"hacpo_mega/data/x.py": "from ..agent.agent import Agent", A: ""}),
    (imports_go_down, {"hacpo_mega/data/x.py": "PRELOAD = 'hacpo_mega.agent.agent'", A: ""}),
    (commands_are_strangers, {f"{CLI}x.py": "from hacpo_mega.cli.y import run", f"{CLI}y.py": ""}),
    (imports_have_no_circle, {"hacpo_mega/data/x.py": "from .y import b", "hacpo_mega/data/y.py": "from .x import a"}),
    (kernels_know_nothing_of_us, {"kernels/hacpo_kernels/x.py": "from hacpo_mega.config import load_config"}),
    (one_door_per_library, {A: "from megatron.core import parallel_state"}),
    (one_door_per_library, {"hacpo_mega/rollout/exchange.py": "import vllm"}),
    (one_door_per_library, {"hacpo_mega/algorithm/objective.py": "import triton.language as tl"}),
    (one_door_per_library, {A: "import wandb"}),
    (one_door_per_library, {"hacpo_mega/logbook/console.py": "def f():\n    from tensorboard import program"}),
    (collectives_have_few_suspects, {A: "import torch.distributed as dist"}),
    (collectives_have_few_suspects, {A: "from torch import distributed"}),
    (algorithm_is_the_paper, {"hacpo_mega/algorithm/x.py": "import json"}),
    (algorithm_is_the_paper, {"hacpo_mega/algorithm/x.py": "import torch.distributed"}),
    (files_that_texts_name_exist, {A: '"""Groups are made in topology.py."""'}),
    (files_that_texts_name_exist, {A: "# see docs/elsewhere.md"}),
    (imports_stand_at_the_top, {A: "def f():\n    import json"}),
    (imports_stand_at_the_top, {A: "import importlib\nx = importlib.import_module('vllm')"}),
    (nothing_is_pickled, {A: "import pickle"}),
    (nothing_is_pickled, {A: "from marshal import loads"}),
    (nothing_is_pickled, {A: "import pickletools"}),
    (nothing_is_pickled, {A: "from torch import load"}),
    (nothing_is_pickled, {A: "from multiprocessing import Pipe"}),
    (nothing_is_pickled, {A: "from torch.distributed.checkpoint import FileSystemReader, load"}),
    *((nothing_is_pickled, {A: line}) for line in RUNNING),
    (text_is_made_visible, {A: "print(answer)"}),
    (environment_is_read_at_the_start, {A: "import os\nx = os.environ['RANK']"}),
    (nothing_is_left_undone, {A: "x = 1  # TODO: two"}),
    (nothing_is_left_undone, {A: "def f():\n    raise NotImplementedError"}),
    (files_and_functions_are_small, {A: "x = 1\n" * (MAX_FILE_LINES + 1)}),
    (files_and_functions_are_small, {A: "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES}),
    (names_say_something, {"hacpo_mega/data/utils.py": ""}),
    (names_say_something, {A: "class WeightManager:\n    pass"}),
    (names_say_something, {A: "def load_helper():\n    pass"}),
    (files_say_what_they_are, {A: "x = 1"}),
    (public_things_are_described, {A: "def roll_out():\n    pass"}),
)


@pytest.mark.parametrize(("rule", "files"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_a_rule_catches_what_breaks_it(rule: Rule, files: dict[str, str]) -> None:
    assert len(list(rule([Source(path, text) for path, text in files.items()]))) == 1


def test_the_house_is_not_a_tower() -> None:
    folders = {path.parent.name for path in (ROOT / "hacpo_mega").glob("*/__init__.py")}
    assert len(FLOORS) <= MAX_FLOORS and len(folders) + 1 <= MAX_ROOMS
    assert folders | {"records"} == {room for rooms in FLOORS for room in rooms}


def test_every_rule_is_shown_to_catch_something() -> None:
    assert {rule for rule, _ in BAD} == set(RULES)


def test_rules_accept_a_file_that_keeps_them() -> None:
    good = (
        '"""What it is."""\n\nimport torch\n\nfrom hacpo_mega.config import AlgorithmConfig\n\n\n'
        'def omega() -> None:\n    """Of k and j."""\n'
    )
    sources = [Source("hacpo_mega/algorithm/omega.py", good), Source("hacpo_mega/config/__init__.py", '"""Types."""\n')]
    assert [complaint for rule in RULES for complaint in rule(sources)] == []


@pytest.mark.parametrize(
    "module",
    [
        "hacpo_mega.config",
        "hacpo_mega.cli",
        "hacpo_mega.logbook.metrics",
        "hacpo_mega.cluster.rank_map",
        *(f"hacpo_mega.models.{file.stem}" for file in sorted((ROOT / "hacpo_mega" / "models").glob("[a-z]*.py"))),
    ],
)
def test_light_rooms_load_no_heavy_library(module: str) -> None:
    heavy = {"torch", "vllm", "megatron", "transformers", "triton", "matplotlib", "tensorflow"}
    code = f"import sys, {module}; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []
