"""The advice at the end of a refusal, taken as it is written: what a user would type after reading it.

A line is `FILE: KEY ... Nearest: VALUE [or VALUE]`, `... Nearest: KEY = VALUE [with KEY = VALUE][, or ...]`, or
`... did you mean 'WORD'?`.
"""

import re

# Keys that stand at the top and not in the table that a line is about.
TABLES = ("agents", "algorithm", "conversation", "data", "evaluation", "logging", "reward", "rollout", "slurm",
          "training")  # fmt: skip
TOP = ("placement", "run_dir", "lanes", "num_steps")


def advices(line: str) -> list[list[str]]:
    """Every alternative that a line offers, each as overrides; `-key` takes a key out."""
    _, _, said = line.partition(": ")
    head, _, advice = said.partition(" Nearest: ")
    if not advice:
        return _meant(said)
    key = re.split(r"[ :]", head)[0]
    agent = key if re.fullmatch(r"agents\.\w+", key) else ""
    if agent:
        key = f"{agent}.{re.split(r'[ :]', head.partition(': ')[2])[0]}"
    advice = re.sub(r" \([\d.]+ GiB\)$", "", advice)
    return [_assigned(part, key) for part in re.split(r",? or ", advice)]


def taken(overrides: list[str], advice: list[str]) -> list[str]:
    """The overrides of somebody who follows an advice: a key set, renamed (OLD>NEW) or taken out (-KEY)."""
    given = list(overrides)
    for word in advice:
        old, renames, new = word.partition(">")
        if word.startswith("-"):
            given = [override for override in given if not override.startswith(word[1:])]
        elif renames:
            given = [f"{new}{override[len(old) :]}" if override.startswith(old) else override for override in given]
        else:
            given.append(word)
    return given


def _assigned(text: str, key: str) -> list[str]:
    """One alternative: assignments, or the value of the key that the line is about."""
    if text in ("without it", "no lora") or text.startswith("no "):
        return [f"-{key if text == 'without it' else _beside(text.removeprefix('no '), key)}"]
    first, *others = re.split(r", with |, (?=\w+ = )| with ", re.sub(r", (which|for) .*", "", text))
    whole = [first if re.match(r"[\w.]+ = ", first) else f"{key} = {first}", *others]
    return [_written(*part.split(" = ", 1), key) for part in whole]


def _written(name: str, value: str, key: str) -> str:
    return f"{_beside(name, key)}={value}"


def _beside(name: str, key: str) -> str:
    """A key as an override has it: a short one is of the table that the line is about."""
    first = name.split(".")[0]
    if first in TABLES or name in TOP or name == key:
        return name
    parts = key.split(".")
    return ".".join([*(parts[:2] if parts[0] == "agents" else parts[:1]), name])


def _meant(said: str) -> list[list[str]]:
    found = re.match(r"(?P<key>[\w.]+): .*did you mean '(?P<word>[\w.*]+)'\?$", said)
    if found is None:
        return []
    if "unknown key" not in said:
        return [[f"{found['key']}={found['word']}"]]
    table = found["key"].rpartition(".")[0]
    is_whole = "." in found["word"] or not table or found["word"] in TOP
    return [[f"{found['key']}>{found['word'] if is_whole else table + '.' + found['word']}"]]
