"""The program that a grading worker starts as: loads its five modules by their files, then serves.

A worker is replaced whenever an answer ends it, and importing the package costs it a second of configuration and hub
libraries that no grader needs. Under their full names in `sys.modules` they are the same modules for a grader that
imports them.
"""

import importlib.util
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
for name in (
    "config.own_file",
    "grading.workers.grader_signature",
    "grading.workers.grader_calls",
    "grading.grader_calls",
    "grading.workers.grading_worker",
):
    spec = importlib.util.spec_from_file_location(f"hacpo_mega.{name}", PACKAGE / f"{name.replace('.', '/')}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
module.main()
