"""Executes a Python file of the user's as a module. Imported by worker processes: the standard library alone.

Not here: which functions of it are called (grader_calls.py).
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


def module_of_file(file: str, kind: str) -> ModuleType:
    """The module that a file makes, under a name of its own by `kind`: one called like a library takes no place of it.

    Raises what the file raises while it is executed.
    """
    spec = importlib.util.spec_from_file_location(f"{kind}_{Path(file).stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up there
    with _found_beside(file):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _found_beside(file: str) -> Iterator[None]:
    """Inside, modules beside the file are found, after all others: they take the place of no library."""
    folder = os.path.dirname(os.path.abspath(file))
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.reverse()
        sys.path.remove(folder)  # the last one
        sys.path.reverse()
