"""The judge of a run, and a trial of its reward. Graders and judge themselves are hacpo_grading's (packages/).

Old module names still work here, for graders of users: hacpo_mega.grading.graders, .grader_calls and .judge, and
hacpo_mega.grading.math_grader as a reward kind, are the modules of hacpo_grading under another name.
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

FOLDERS = ("", ".graders", ".workers", ".texts")


class _MovedModules(MetaPathFinder, Loader):
    """Finds a module of hacpo_grading by its name below hacpo_mega.grading, with or without its folder."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        above, _, rest = name.partition(f"{__name__}.")
        for folder in FOLDERS if rest and not above else ():
            try:
                spec = find_spec(f"hacpo_grading{folder}.{rest}")
            except ModuleNotFoundError:  # a module above it is not in this folder
                continue
            if spec is not None:
                return ModuleSpec(name, self, origin=spec.origin, loader_state=spec.name)
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(module.__spec__.loader_state)


sys.meta_path.insert(0, _MovedModules())
