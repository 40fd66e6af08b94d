"""The benchmarks of the kernels run from end to end on a CPU: gate, table, CSV, plot. Times mean nothing there."""

import csv
import os
import subprocess
import sys

import pytest


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name, candidates",
    [
        ("linear_logprob", ("ours", "eager")),
        ("sequence_objective", ("ours",)),
        ("elementwise", ("ours", "eager")),
        ("experts", ("ours",)),
    ],
)
def test_a_benchmark_gates_measures_and_writes(name, candidates, tmp_path, request):
    script = request.config.rootpath / "kernels" / "bench" / f"{name}.py"
    asked = [sys.executable, script, "--device", "cpu", "--shapes", "tiny", "--rounds", "3", "--warmups", "1"]
    asked += ["--out", tmp_path, "--only", *candidates, "Liger", "QuACK"]
    told = subprocess.run(asked, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert told.returncode == 0, told.stdout + told.stderr
    [table] = tmp_path.glob("*.csv")
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    ours = [row for row in rows if row["candidate"].startswith("ours")]
    assert {"ours (triton)", "ours (plain torch)"} <= {row["candidate"] for row in ours}
    assert all(row["gate"].startswith("exact") and float(row["p50_ms"]) > 0 for row in ours)
    assert all(row["commit"] and row["device"] for row in rows)
    assert len(list(tmp_path.glob("*.png"))) == len(list(tmp_path.glob("*.md"))) == 1
    if name == "linear_logprob":
        rounded = [row for row in rows if row["candidate"] == "eager, bf16 logits"]
        assert all(row["gate"].startswith("rounds logits") for row in rounded), "the gate must see bf16 logits"
        assert "missing Liger FLCE" in told.stdout
