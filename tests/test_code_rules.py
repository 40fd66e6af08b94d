"""Rules for a file of the product: small, described, finished; it prints, reads and runs nothing unseen.

Every rule is a function from parsed files to complaints, and is shown here to catch a file that breaks it. Who may
import whom is in test_architecture.py.
"""

import ast
import collections
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest
from house_rules import ROOT, Complaints, Rule, Source, Sources, functions, read_limits, read_sources

# Before the start, or where a library reads its settings from there and nowhere else.
ENVIRONMENT = (
    # what an agent program reads, in the process that runs it
    "hacpo_mega/conversations/environment_process.py",
    "packages/hacpo_lab/hacpo_lab/forked.py",
    "hacpo_mega/cluster/machine/device.py",
    "hacpo_mega/cluster/machine/environment.py",
    # the key of a server, by the name that the configuration gives
    "packages/hacpo_grading/hacpo_grading/graders/model_judge.py",
    "hacpo_mega/jobs/forked_rank.py",
    "hacpo_mega/jobs/local.py",
    "hacpo_mega/jobs/slurm_held.py",
    "hacpo_mega/cluster/machine/machine_limits.py",  # what Slurm gave to the job
    "hacpo_mega/cluster/place.py",
    "hacpo_mega/cluster/security/private_folder.py",
    "hacpo_mega/cluster/rank_map.py",
    "hacpo_mega/cluster/rendezvous.py",
    "hacpo_mega/cluster/launcher_env.py",
    "hacpo_mega/cluster/security/secret.py",
    "hacpo_mega/cluster/watchdog.py",
    "hacpo_mega/megatron/model/platform.py",
    "hacpo_mega/rollout/engine.py",
    "hacpo_mega/rollout/vllm/host_process.py",
)
EMPTY_WORDS = {"util", "utils", "common", "helper", "helpers", "manager", "misc"}
MAX_FILE_LINES = 550
MAX_TEST_NAME = 70
MAX_FILES = 14  # of Python in a folder of tests/support
# The file of `say`, packages that have none, and processes that write to their parent alone.
PRINTS = (
    *(
        "hacpo_mega/models/files/visible.py",
        "hacpo_mega/models/files/chat_template.py",
        "packages/hacpo_grading/hacpo_grading/workers/guarded_workers.py",
        "packages/hacpo_grading/hacpo_grading/workers/sandbox.py",
    ),
    "kernels/hacpo_kernels/",
)
# The one place that is given pickles, and reads them without calling anything.
READS_PICKLES = ("hacpo_mega/cluster/security/plain_pickle.py",)
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
CODE_ATTRIBUTES = OBJECT_COLLECTIVES | {name.rpartition(".")[2] for name in MAKES_CODE}
MAY_RUN_CODE = ("weights_only", "shell", "allow_pickle")  # arguments
MAX_FUNCTION_LINES = 60  # of code, docstring aside
MAX_ARGUMENTS = 12
# An actor is made of what a whole configuration says, and agent.py alone names all of it.
MANY_ARGUMENTS = ("hacpo_mega/cli/", "packages/hacpo_lab/hacpo_lab/commands/")
# Words with which no docstring opens: a noun phrase or a verb in the third person says at once what a thing is.
QUESTIONS = frozenset(["of", "what", "whose", "who", "which", "whether", "that", "those", "how", "when"])
# Names that were changed to the field's term: old -> new.
OLD_NAMES = {
    "Answering": "RolloutClient",
    "EngineDoor": "EngineStreamGuard",
    "EngineRank": "RolloutClient",
    "Handed": "Trainer",
    "Publication": "WeightSync",
    "PublishPlan": "WeightSyncPlan",
    "StepFindings": "StepResult",
    "Told": "EvenBatches",
    "ViewCounts": "ReencodingCounts",
    "ViewRules": "ReencodingRules",
    "finish_leaving": "finish_offload",
    "kin": "traits",
    "layers_said": "backend_summary",
    "left_over": "fallback",
    "loaders_said": "fallback_summary",
    "publication_said": "weight_sync_summary",
    "require_home": "ensure_on_device",
    "routing_said": "routing_summary",
    "start_leaving": "begin_offload",
    "start_returning": "begin_onload",
}
MAX_KERNEL_LINES = 120  # a Triton kernel is one function: cutting it up would hide what stays in registers


def nothing_is_pickled(sources: Sources) -> Complaints:
    """Words of a peer or a file are bytes of a stated layout, and no text becomes code."""
    for source in sources:
        for line, name in source.imports():
            if f"{name}.".startswith(RUNS_WHAT_IT_READS) and not source.lies_in(READS_PICKLES):
                yield f"{source.path}:{line}: {name}; what is read back must not run as code"
        for node in source.nodes:
            if found := _runs_what_it_is_given(node):
                yield f"{source.path}:{node.lineno}: {found}; what is read back must not run as code"


def _runs_what_it_is_given(node: ast.AST) -> str | None:
    """The words by which a node of the source would unpickle, or make code of a text."""
    if isinstance(node, ast.Name) and node.id in ("eval", "exec", "compile"):
        return node.id
    if isinstance(node, ast.Attribute):
        if node.attr not in CODE_ATTRIBUTES:  # writing a node out takes long
            return None
        name = ast.unparse(node)
        return name if node.attr in OBJECT_COLLECTIVES or name.endswith(MAKES_CODE) else None
    if not isinstance(node, ast.Call):
        return None
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg in MAY_RUN_CODE}
    if isinstance(node.func, ast.Attribute) and node.func.attr == "load":
        called = ast.unparse(node.func)
        if "torch" in called and given.get("weights_only") != "True":
            return f"{called}() without weights_only=True"
    loud = {"shell": "False", "allow_pickle": "False"}
    return next((f"{key}={given[key]}" for key, quiet in loud.items() if given.get(key, quiet) != quiet), None)


def text_is_made_visible(sources: Sources) -> Complaints:
    """Foreign text is shown, not obeyed: nobody but `say` prints, where what is quoted is written out."""
    for source in sources:
        for node in source.nodes:
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("print", "typer.echo") and not source.lies_in(PRINTS):
                yield f"{source.path}:{node.lineno}: {called}() prints as it is; models/files/visible.py has say()"


def environment_is_read_at_the_start(sources: Sources) -> Complaints:
    for source in sources:
        for node in source.nodes:
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


def functions_take_records(sources: Sources) -> Complaints:
    """Functions that need more than a few arguments take a record; a command's are its options, a kernel's pointers."""
    for source in sources:
        for function in functions(source):
            is_kernel = any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)
            if is_kernel or source.lies_in(MANY_ARGUMENTS):
                continue
            given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            if (number := len([argument for argument in given if argument.arg not in ("self", "cls")])) > MAX_ARGUMENTS:
                yield f"{source.path}:{function.lineno}: {function.name}() takes {number} arguments; give it a record"


def names_say_something(sources: Sources) -> Complaints:
    for source in sources:
        names = [(1, PurePosixPath(source.path).stem)]
        names += [(n.lineno, n.name) for n in source.nodes if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        for line, name in names:
            words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
            if empty := EMPTY_WORDS & {word.lower() for word in words}:
                yield f"{source.path}:{line}: {name}: {', '.join(empty)} says nothing"


def docstrings_open_with_their_subject(sources: Sources) -> Complaints:
    """A room may have as many others as tests/limits.toml says, and no more."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for source in sources:
        room = PurePosixPath(source.path).with_suffix("").parts[1]
        for line, text in docstrings(source):
            if re.split(r"[^\w']", text, maxsplit=1)[0].lower() in QUESTIONS:
                found[room].append(f"{source.path}:{line}: {text[:60]!r}")
    for room, places in found.items():
        if len(places) > (most := read_limits().docstrings.get(room, 0)):
            some = "; ".join(places[:5])
            yield f"room {room!r}: {len(places)} docstrings open with a question, more than {most}, such as {some}"


def docstrings(source: Source) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring of a file."""
    for node in source.nodes:
        described = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if described and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def names_are_the_fields(sources: Sources) -> Complaints:
    """One thing, one name, and of these the one that an engineer of another trainer would search for."""
    for source in sources:
        for node in source.nodes:
            for name in (getattr(node, field, None) for field in ("id", "attr", "arg", "name")):
                if isinstance(name, str) and (new := OLD_NAMES.get(name)):
                    yield f"{source.path}:{getattr(node, 'lineno', 1)}: {name} is called {new}"


def class_names_are_unique(sources: Sources) -> Complaints:
    """One word, one meaning: whoever searches for a class finds one."""
    for name, places in class_places(sources).items():
        if len(places) > read_limits().class_names.get(name, 1):
            yield f"{', '.join(places)}: class {name} stands {len(places)} times; give each its own name"


def class_places(sources: Sources) -> dict[str, list[str]]:
    """By name of a public class of the product, the files that define one."""
    places: dict[str, list[str]] = collections.defaultdict(list)
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(source.path)
    return places


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


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring: saying more about it is not to be punished."""
    opening = function.body[0]
    described = ast.get_docstring(function) is not None
    return function.end_lineno - function.lineno + 1 - described * (opening.end_lineno - opening.lineno + 1)


RULES: tuple[Rule, ...] = (
    nothing_is_pickled,
    text_is_made_visible,
    environment_is_read_at_the_start,
    nothing_is_left_undone,
    files_and_functions_are_small,
    functions_take_records,
    names_say_something,
    docstrings_open_with_their_subject,
    names_are_the_fields,
    class_names_are_unique,
    files_say_what_they_are,
    public_things_are_described,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps(rule: Rule) -> None:
    complaints = list(rule(read_sources()))
    assert complaints == [], "\n" + "\n".join(complaints)


def test_no_test_file_is_long() -> None:
    lengths = {file: len(file.read_text("utf-8").splitlines()) for file in (ROOT / "tests").rglob("*.py")}
    too_long = [f"{file.relative_to(ROOT)}: {n} lines" for file, n in lengths.items() if n > MAX_FILE_LINES]
    assert len(lengths) > 100 and too_long == []


def test_no_name_of_a_test_is_long() -> None:
    written = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
    files = [file.relative_to(ROOT) for file in (ROOT / "tests").rglob("*.py")]
    names = [(file, name) for file in files for name in written.findall((ROOT / file).read_text("utf-8"))]
    too_long = [f"{file}: {name}" for file, name in names if len(name) > MAX_TEST_NAME]
    assert len(names) > 1000 and too_long == []


def sources_below(*folders: str) -> Sources:
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return [Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def test_launchers_and_kernel_benchmarks_unpickle_nothing() -> None:
    sources = sources_below("launch", "kernels/bench")
    assert sources and list(nothing_is_pickled(sources)) == []


def test_docstrings_beside_the_product_open_with_their_subject() -> None:
    sources = sources_below("launch", "kernels/bench", "docs", "tests", "packages/hacpo_lab/benchmarks")
    opening = re.compile(
        rf'^ *"""({"|".join(QUESTIONS)})\b', re.IGNORECASE | re.MULTILINE
    )  # to parse no file for nothing
    complaints = list(docstrings_open_with_their_subject([s for s in sources if opening.search(s.text)]))
    assert len(sources) > 100 and complaints == [], "\n" + "\n".join(complaints)


def test_no_test_of_the_product_imports_the_lab() -> None:
    sources = [source for source in sources_below("tests") if not source.path.startswith("tests/lab/")]
    imports = [(s.path, name) for s in sources if "hacpo_lab" in s.text for _, name in s.imports()]
    assert [place for place in imports if place[1].split(".")[0] == "hacpo_lab"] == []


def test_no_folder_of_support_is_a_drawer() -> None:
    counts = collections.Counter(file.parent for file in (ROOT / "tests" / "support").rglob("*.py"))
    assert [str(folder) for folder, number in counts.items() if number > MAX_FILES] == []


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
    (functions_take_records, {A: f"def f({', '.join(f'a{i}' for i in range(MAX_ARGUMENTS + 1))}):\n    pass"}),
    (names_say_something, {"hacpo_mega/data/utils.py": ""}),
    (names_say_something, {A: "class WeightManager:\n    pass"}),
    (names_say_something, {A: "def load_helper():\n    pass"}),
    *((docstrings_open_with_their_subject, {A: f'"""{word} it is."""'}) for word in ("What", "Of", "Whether", "Those")),
    (docstrings_open_with_their_subject, {A: 'class Wave:\n    def f():\n        """How it goes."""'}),
    (names_are_the_fields, {A: "x = architecture.kin"}),
    (names_are_the_fields, {A: "class Publication:\n    pass"}),
    (class_names_are_unique, {A: "class X:\n    pass", "hacpo_mega/data/x.py": "class X:\n    pass"}),
    (files_say_what_they_are, {A: "x = 1"}),
    (public_things_are_described, {A: "def roll_out():\n    pass"}),
)


@pytest.mark.parametrize(("rule", "files"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_a_rule_catches_what_breaks_it(rule: Rule, files: dict[str, str]) -> None:
    assert len(list(rule([Source(path, text) for path, text in files.items()]))) == 1


def test_every_rule_is_shown_to_catch_something() -> None:
    assert {rule for rule, _ in BAD} == set(RULES)


def test_every_exception_is_still_needed() -> None:
    counts = {name: len(places) for name, places in class_places(read_sources()).items()}
    assert {name: counts.get(name, 0) for name in read_limits().class_names} == read_limits().class_names


def test_rules_accept_a_file_that_keeps_them() -> None:
    good = (
        '"""Omega of two agents."""\n\nimport torch\n\nfrom hacpo_mega.config import AlgorithmConfig\n\n\n'
        'def omega() -> None:\n    """Ratio of the capabilities of k and j."""\n'
    )
    sources = [Source("hacpo_mega/algorithm/omega.py", good), Source("hacpo_mega/config/__init__.py", '"""Types."""\n')]
    assert [complaint for rule in RULES for complaint in rule(sources)] == []
