"""Before any test: without a GPU the Triton kernels run in Triton's interpreter. And who runs which tests.

Triton decides at import, so hacpo_kernels is imported here under the variable; afterwards the variable is as it was,
so that engines and ranks which tests start do not interpret their own kernels.
"""

import importlib
import os

import pytest
import torch

FOUR_RANKS = {
    "test_actor",
    "test_exchange",
    "test_failure",
    "test_fused_head",
    "test_gradient_invariance",
    "test_megatron_layout",
    "test_place",
    "test_refusal",
    "test_trainer",
}

if not torch.cuda.is_available():
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    # Gluon too: Triton imports it at the first launch, and it refuses a half-interpreted language then.
    for module in ("hacpo_kernels", "triton.experimental.gluon"):
        importlib.import_module(module)
    if before is None:
        del os.environ["TRITON_INTERPRET"]


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers (pytest -n) a file stays on one, because its tests share the job that it starts.

    The files that start four ranks share one worker: two such jobs at a time would crowd a machine of two cores, where
    every collective then waits for the scheduler.
    """
    for item in items:
        starts_four = item.path.parent.name == "jobs" and item.path.stem in FOUR_RANKS
        item.add_marker(pytest.mark.xdist_group("four ranks" if starts_four else item.path.stem))
