"""docs/design/testing.md lists every file where CUDA and the CPU part, the twin of its branch, and tests that exist."""

import re

from repository import ROOT

BRANCH = re.compile(
    r'is_cuda\b|torch\.cuda\b|[!=]= "cuda"|== "nccl"|_has_cuda\(\)|on_cuda\b|SIMULATED_ON|"nvidia-smi"|NVML'
    r'|is_cpu\b|device\.type == "cpu"'
    r"|is_cpu_build\(\)|device\.(mixed|engine_sleeps|flash_attention)"
)
PAGE = (ROOT / "docs" / "design" / "testing.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## Branches that only CUDA enters")[2].partition("\n## ")[0]


def test_every_cuda_branch_is_listed():
    found = {"hacpo_kernels"}
    for folder in (ROOT / "hacpo_mega", *(ROOT / "packages").iterdir()):
        files = (file for file in folder.rglob("*.py") if BRANCH.search(file.read_text(encoding="utf-8")))
        found |= {file.relative_to(folder).as_posix() for file in files}
    rows = [row.split("|")[1] for row in TABLE.splitlines() if row.replace("| ", "|").startswith("|`")]
    listed = set(re.findall(r"`([^`]+)`", " ".join(rows)))
    assert found - listed == set(), "give it a twin on the CPU, or a case in tests/gpu, and a line in the table"
    assert len(found) > 8


def test_twins_and_cases_exist():
    named = set(re.findall(r"`((?:lab/)?(?:unit|jobs|gpu)/test_\w+\.py)", PAGE))
    assert len(named) > 10
    assert [name for name in named if not (ROOT / "tests" / name).is_file()] == []
