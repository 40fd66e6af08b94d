"""A Dockerfile, instruction by instruction, and what this project does not let one say."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
HASHED = re.compile(r"[A-Za-z0-9_.-]+==[0-9][^ ]* --hash=sha256:[0-9a-f]{64}")
SECRET = re.compile(
    r"(?i)(token|secret|password|passwd|credential|api_?key|\.netrc|id_rsa|--mount=type=(?:secret|ssh))"
)
Instruction = tuple[str, str]  # its word, and the rest on one line


def instructions(text: str) -> list[Instruction]:
    """Every instruction in order, without comments, its continued lines joined."""
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def requirements(file: Path) -> list[str]:
    """The lines of a requirements file without comments."""
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]


def problems(text: str, context: Path) -> list[str]:
    """The faults of a Dockerfile whose build context is `context`, a line each."""
    found = instructions(text)
    return [said for rule in RULES for said in rule(found, context)]


def _bases(found: list[Instruction], context: Path) -> Iterator[str]:
    """A base is an earlier stage, or an image by its digest, perhaps through an ARG of that default."""
    names = dict(rest.split("=", 1) for word, rest in found if word == "ARG" and "=" in rest)
    stages: set[str] = set()
    for base, _, stage in (rest.partition(" AS ") for word, rest in found if word == "FROM"):
        image = re.sub(r"\$\{(\w+)\}", lambda given: names.get(given[1], ""), base)
        if base not in stages and not DIGEST.search(image):
            yield f"FROM {base}: neither an earlier stage nor named by its digest"
        stages.add(stage)


def _installs(found: list[Instruction], context: Path) -> Iterator[str]:
    """pip takes wheels at hand, a lock without dependencies, or hashes; apt no more than is asked, and no leftovers."""
    for command in _commands(found):
        if re.search(r"\bpip (install|wheel|download)\b", command):
            is_locked = "--constraint /opt/lock/" in command or "--requirement /opt/lock/" in command
            at_hand = "--no-index" in command or "/build/apex" in command or "/build/project" in command
            if not ("--require-hashes" in command or is_locked or at_hand):
                yield f"{command[:60]}: neither hashes nor a lock nor what is at hand"
            if "--no-deps" not in command and "--constraint" not in command:
                yield f"{command[:60]}: takes dependencies that nothing pins"
        if "apt-get install" in command and "--no-install-recommends" not in command:
            yield f"{command[:60]}: without --no-install-recommends"
        if re.search(r"\b(curl|wget)\b|pip install .*git\+|add-apt-repository", command):
            yield f"{command[:60]}: takes what is pinned by nothing"
    for word, rest in found:
        if word == "RUN" and "apt-get install" in rest and "rm -rf /var/lib/apt/lists/*" not in rest:
            yield f"RUN {rest[:50]}: leaves apt's lists"
        if word == "RUN" and "git fetch" in rest and "rev-parse HEAD" not in rest:
            yield f"RUN {rest[:50]}: does not look at what it fetched"
        if word == "ADD":
            yield f"ADD {rest}: COPY says what it does"


def _commands(found: list[Instruction]) -> Iterator[str]:
    for word, rest in found:
        if word == "RUN":
            yield from (part.strip() for part in re.split(r"&&|;(?!\d)", rest))


def _files(found: list[Instruction], context: Path) -> Iterator[str]:
    """Copied files are there, and never everything."""
    for word, rest in found:
        sources = rest.split()[:-1]
        if word == "COPY" and not rest.startswith("--from"):
            yield from (f"COPY {name}: not in the repository" for name in sources if not (context / name).exists())
            yield from (f"COPY {name}: all that lies about" for name in sources if name in (".", "./"))


def _end(found: list[Instruction], context: Path) -> Iterator[str]:
    """Nothing secret, and the last stage runs as somebody who is not root."""
    for word, rest in found:
        if SECRET.search(rest):
            yield f"{word} {rest[:50]}: a secret would stay in a layer"
    last = max(number for number, (word, _) in enumerate(found) if word == "FROM")
    users = [rest for word, rest in found[last:] if word == "USER"]
    if not users or users[-1].partition(":")[0] in ("root", "0"):
        yield "the last stage runs as root"


RULES: tuple[Callable[[list[Instruction], Path], Iterator[str]], ...] = (_bases, _installs, _files, _end)
