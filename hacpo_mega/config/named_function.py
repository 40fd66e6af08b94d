"""Code of the user's that a configuration names: "FILE.py:name", or "module:name" for one that Python finds.

Paths count from the current folder. Whether there is such a name is said before anything runs (grader_checks.py); here
its file is executed. Not here: graders, which run in processes of their own (grading/grader_calls.py).
"""

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hacpo_mega.config.schema import Config


def require_named_functions(config: Config) -> None:
    """Executes what [algorithm] and [logging] name, before models load. ValueError, one line, where it fails."""
    algorithm = config.algorithm
    for name in (algorithm.advantages, algorithm.objective, *config.logging.metrics):
        if name is not None:
            named_function(name)


@functools.lru_cache(maxsize=64)
def named_function(name: str) -> Callable:
    """The function or class of that name; a file is executed once per process. ValueError, one line, where it fails."""
    place, _, attribute = name.rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"own_code_{Path(place).stem}", place)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # a dataclass looks its module up there
            with _found_beside(place):
                spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        found = getattr(module, attribute)
    except Exception as error:
        raise ValueError(f"{name}: {type(error).__name__} while it was loaded: {error}".splitlines()[0]) from error
    if not callable(found):
        raise ValueError(f"{name} is a {type(found).__name__}, and a function is needed")
    return found


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
