"""Loads the user's code: a Python file, or a module that Python finds. Imports the standard library alone.

Elsewhere: the calls of its functions (grader_calls.py).
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load_by_name(spec: str, prefix: str = "own_grader") -> Any:
    """The object that "package.module:name" or "path/to/file.py:name" names."""
    source, _, name = spec.rpartition(":")
    if not source:
        raise ValueError(f"{spec!r} is no grader; write module:function or file.py:function")
    return getattr(own_module(source, prefix), name)


def own_module(source: str, prefix: str) -> ModuleType:
    """The module of a Python file, executed anew, or of a name that Python finds, imported.

    The name of a file's module begins with `prefix`, so that it never replaces a library of that name. Raises what the
    code raises.
    """
    if not source.endswith(".py"):
        return importlib.import_module(source)
    spec = importlib.util.spec_from_file_location(f"{prefix}_{Path(source).stem}", source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up there
    # Last on the path, so that modules beside the file replace no library. It stays there: a function may import one
    # when it is called.
    folder = os.path.dirname(os.path.abspath(source))
    sys.path += [folder] if folder not in sys.path else []
    spec.loader.exec_module(module)
    return module
