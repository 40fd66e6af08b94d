"""Signatures of the libraries that a stand-in stands for, as their sources declare them.

    python tests/unit/house/signatures.py RELEASE FOLDER   FOLDER has the package's source; writes into signatures.json

A stand-in's own source is read the same way (tests/unit/house/test_signatures.py), so both sides are text, and nothing
of a library is imported. Annotations are left out; names, order, defaults and what is by keyword alone are kept.
"""

import ast
import json
import sys
from pathlib import Path

RECORD = Path(__file__).with_name("signatures.json")


def signature(source: str, name: str) -> str:
    """The parameters of `function` or `Class.method` as a line of Python. KeyError where the source has none."""
    body = ast.parse(source).body
    for part in name.split("."):
        found = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
        if not found:
            raise KeyError(name)
        body = found[-1].body
    arguments = found[-1].args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for argument in filter(None, every):
        argument.annotation = None
    return ast.unparse(arguments)


def read_record() -> dict[str, dict[str, dict[str, str]]]:
    """release -> file of it -> name -> signature."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


if __name__ == "__main__":
    release, folder = sys.argv[1], Path(sys.argv[2])
    record = read_record()
    for file, names in record[release].items():
        names.update({name: signature((folder / file).read_text(encoding="utf-8"), name) for name in names})
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
