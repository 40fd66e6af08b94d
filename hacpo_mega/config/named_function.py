"""Code of the user's that a configuration names: "FILE.py:name", or "module:name" for one that Python finds.

Paths count from the current folder. Whether there is such a name is said before anything runs (grader_checks.py); here
its file is executed. Not here: graders, which run in processes of their own (grading/grader_calls.py).
"""

import functools
import importlib
from collections.abc import Callable

from hacpo_mega.config.own_file import module_of_file
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
        module = module_of_file(place, "own_code") if place.endswith(".py") else importlib.import_module(place)
        found = getattr(module, attribute)
    except Exception as error:
        raise ValueError(f"{name}: {type(error).__name__} while it was loaded: {error}".splitlines()[0]) from error
    if not callable(found):
        raise ValueError(f"{name} is a {type(found).__name__}, and a function is needed")
    return found
