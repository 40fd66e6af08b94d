"""The program that a grading worker starts as: loads its five modules by their files, then serves.

A worker is replaced whenever an answer ends it, and others wait for its start, so it loads no more than it needs. Under
their full names in `sys.modules` they are the same modules for a grader that imports them.
"""

import importlib.util
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
for name in (
    "judgement",
    "texts.chat_messages",
    "workers.own_file",
    "workers.grader_signature",
    "workers.grader_calls",
    "workers.grading_worker",
):
    spec = importlib.util.spec_from_file_location(f"{PACKAGE.name}.{name}", PACKAGE / f"{name.replace('.', '/')}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
if __name__ == "__main__":  # else a process that a grader has spawned reads it for its functions
    module.main()
