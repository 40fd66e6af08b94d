"""Loads the user's code: a Python file, or a module that Python finds. Imports the standard library alone.

Elsewhere: which functions of it are called (grader_calls.py).
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load_by_name(spec: str, kind: str = "own_grader") -> Any:
    """The object that "package.module:name" or "path/to/file.py:name" names."""
    place, _, name = spec.rpartition(":")
    if not place:
        raise ValueError(f"{spec!r} is no grader; write module:function or file.py:function")
    return getattr(own_module(place, kind), name)


def own_module(place: str, kind: str) -> ModuleType:
    """The module of a Python file, executed anew, or of a name that Python finds, imported.

    A file's module has a name of its own by `kind`: one called like a library takes no place of it. Raises what the
    code raises.
    """
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(f"{kind}_{Path(place).stem}", place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up there
    # Modules beside it are found after all others, so that they take no library's place; and for good: a function may
    # import one when it is called.
    folder = os.path.dirname(os.path.abspath(place))
    sys.path += [folder] if folder not in sys.path else []
    spec.loader.exec_module(module)
    return module
