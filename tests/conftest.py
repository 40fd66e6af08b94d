"""Before any test: without a GPU the Triton kernels run in Triton's interpreter. And who runs which tests.

Triton decides at import, so hacpo_kernels is imported here under the variable; afterwards the variable is as it was,
so that engines and ranks which tests start do not interpret their own kernels.
"""

import importlib
import os
from pathlib import Path

import hypothesis
import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

FOUR_RANKS = {
    "test_actor",
    "test_answers_ahead",
    "test_checkpoint",
    "test_exchange",
    "test_failure",
    "test_fused_head",
    "test_gradient_invariance",
    "test_megatron_layout",
    "test_overlap",
    "test_place",
    "test_preflight",
    "test_refusal",
    "test_relayout",
    "test_three_agents",
    "test_store_traffic",
    "test_trainer",
    "test_tree",
    "test_training",
}

if not torch.cuda.is_available():
    # A CPU environment on a machine with GPUs runs these tests on the CPU, and says so (cluster/device.py).
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    # Gluon too: Triton imports it at the first launch, and it refuses a half-interpreted language then.
    for module in ("hacpo_kernels", "triton.experimental.gluon"):
        importlib.import_module(module)
    if before is None:
        del os.environ["TRITON_INTERPRET"]


# No test is about speed: drawn examples take longer on a crowded machine, and that is no finding.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")


class ByFile(LoadScopeScheduling):
    """Who runs what under `pytest -n`: a file stays on one worker, because its tests share the job that it starts.

    On a small machine the files that start four ranks share one worker: two such jobs at a time would crowd it, and
    every collective would then wait for the scheduler.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        is_crowded = (os.cpu_count() or 1) < 8 and Path(file).stem in FOUR_RANKS
        return "four ranks" if is_crowded else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return ByFile(config, log)
