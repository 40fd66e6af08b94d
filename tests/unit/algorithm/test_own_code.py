"""Advantages, objectives, numbers and trackers of the user's own, named in the configuration."""

import math
import re
from pathlib import Path

import pytest
import torch
from method_cases import answers_of, judged, sequence_objective
from repository import ROOT
from run_cases import CHARACTERS, agent_table, write_config

from hacpo_mega.algorithm import learning_of, objective_loss
from hacpo_mega.config import AlgorithmConfig, load_config
from hacpo_mega.config.user_code import named_function, unfinished_import

FILE = ROOT / "tests" / "support" / "own_code.py"
REWARDS_PNG = torch.tensor([[[1.0, 0.0], [0.5, math.nan]], [[0.0, 0.0], [1.0, 0.25]]], dtype=torch.float64)
EQUAL_N = torch.ones(2)


def test_own_advantages_are_what_is_trained():
    config = AlgorithmConfig(method="naive", advantages=f"{FILE}:own_mean")
    learning = learning_of(judged(REWARDS_PNG, EQUAL_N, 0), config)
    assert learning.advantages_PNG.tolist() == [[[0.5, -0.5], [0.0, 0.0]], [[0.0, 0.0], [0.375, -0.375]]]
    assert learning.trains_PNG.tolist() == [[[True, True], [False, False]], [[False, False], [True, True]]]


def test_a_method_that_shares_nothing_shares_nothing():
    config = AlgorithmConfig(method="gspo", advantages=f"{FILE}:own_mean")
    assert learning_of(judged(REWARDS_PNG, EQUAL_N, 1), config).advantages_PNG[:, 0].abs().sum() == 0.0


@pytest.mark.parametrize("name, says", [("too_short", r"must return a tensor \(2, 2, 2\)"), ("infinite", "not finite")])
def test_advantages_that_cannot_be_trained_are_refused(name, says):
    with pytest.raises(ValueError, match=says):
        learning_of(judged(REWARDS_PNG, EQUAL_N, 0), AlgorithmConfig(method="naive", advantages=f"{FILE}:{name}"))


def packed(logprob_R: torch.Tensor, name: str):
    """Four answers of 1 to 4 tokens under an objective of own_code.py: ratios on every side of GSPO's clip."""
    starts = torch.tensor([0, 1, 3, 6, 10], dtype=torch.int32)
    shift_B = torch.tensor([0.0, 1e-3, -1e-3, 2e-4], dtype=torch.float64)
    length_B = starts.diff().double()
    mean_B = torch.segment_reduce(logprob_R.detach(), "sum", offsets=starts.long()) / length_B
    rest = mean_B - shift_B, torch.tensor([1.0, 0.5, -2.0, 1.5]), torch.tensor([True, False, True, False]), length_B
    config = AlgorithmConfig(method="naive", objective=f"{FILE}:{name}")
    return mean_B, rest, objective_loss(answers_of(logprob_R, starts, *rest, 0), None, config)


def test_an_own_objective_has_the_gradient_of_the_fused_one():
    """GSPO's clip in torch against the reference that both kernels are held to."""
    logprob_R = -torch.rand(10, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logprob_R.requires_grad_()
    mean_B, (source_B, advantage_B, is_self_B, length_B), (loss_B, terms) = packed(logprob_R, "clipped")
    loss_B.sum().backward()
    naive = AlgorithmConfig(method="naive")
    wanted_B, slope_B, _ = sequence_objective(mean_B, source_B, advantage_B, is_self_B, 0, naive)
    torch.testing.assert_close(loss_B.detach(), wanted_B, rtol=1e-12, atol=0)
    torch.testing.assert_close(terms.weight_B, -slope_B.double() / advantage_B.double(), rtol=1e-12, atol=0)
    assert (terms.weight_B == 0).tolist() == [False, True, True, False]
    spread_R = torch.repeat_interleave(slope_B.double() / length_B, length_B.long())
    torch.testing.assert_close(logprob_R.grad, spread_R, rtol=1e-12, atol=0)


def test_an_objective_that_the_policy_does_not_enter_is_refused():
    with pytest.raises(ValueError, match="does not depend on log_ratio_B"):
        packed(torch.zeros(10, dtype=torch.float64, requires_grad=True), "flat")


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"algorithm": {"advantages": f"{FILE}:own_meen"}}, "has no function 'own_meen'; did you mean 'own_mean'?"),
        (
            {"algorithm": {"advantages": f"{FILE}:clipped"}},
            "takes 4 arguments; algorithm.advantages takes one, the record Judged",
        ),
        ({"algorithm": {"objective": "absent.py:f"}}, "the file absent.py does not exist"),
        ({"algorithm": {"objective": f"{'x' * 5000}.py:f"}}, "xxx.py does not exist"),
        ({"algorithm": {"objective": "no_such_module:f"}}, "there is no module 'no_such_module'"),
        ({"algorithm": {"method": "grpo", "objective": f"{FILE}:clipped"}}, 'Set method = "gspo", which trains'),
        ({"logging": {"metrics": [f"{FILE}:fails", "else.py:fails"]}}, "names one twice"),
        ({"logging": {"metrics": ["length_of"]}}, "logging.metrics"),
        ({"logging": {"trackers": [f"{FILE}:Note"]}}, "has no class 'Note'; did you mean 'Notes'?"),
        ({"logging": {"trackers": ["tensorbord"]}}, "logging.trackers"),
    ],
)
def test_names_that_lead_nowhere_are_one_line(tmp_path, settings, says):
    file = write_config(tmp_path, [agent_table(tmp_path, "a", "qwen3", CHARACTERS)], **settings)
    with pytest.raises(ValueError, match=rf"\A[^\n]*{re.escape(says)}[^\n]*(\n[^\n]*)?\Z"):
        load_config(file)


def test_a_file_that_fails_is_named(tmp_path: Path):
    (tmp_path / "broken.py").write_text("def f(): pass\nraise OSError('disk')\n")
    with pytest.raises(ValueError, match=r"broken.py:f: OSError while it was loaded: disk$"):
        named_function(f"{tmp_path}/broken.py:f")


TRACKER = (
    "class Own:\n    def __init__(self, run): pass\n    def log(self, step, values): pass\n    def finish(self): pass\n"
)


@pytest.mark.parametrize(
    "code, says",
    [
        pytest.param("import time; time.sleep(10**6)", "has not ended after 8 s: it waits", marks=pytest.mark.nightly),
        pytest.param("while True: print('x')", "has not ended after 8 s: it waits or loops", marks=pytest.mark.nightly),
        ("import os; os._exit(0)", "ends its process (exit status 0); a file must come to its end, without an exit"),
        ("import os; os.kill(os.getpid(), 11)", "ends its process (SIGSEGV); a file must come to its end"),
        ("import os, time\nif os.fork(): os._exit(0)\ntime.sleep(600)", "ends its process (exit status 0); a file"),
    ],
)
def test_an_import_that_comes_to_no_end_is_named_before_it_is_a_ranks(tmp_path, code, says):
    (tmp_path / "own.py").write_text(f"{code}\n{TRACKER}")
    agents = [agent_table(tmp_path, "a", "qwen3", CHARACTERS)]
    logging = {"metrics": [f"{FILE}:length_of"], "trackers": [f"{tmp_path}/own.py:Own"]}
    config = load_config(
        write_config(tmp_path, agents, logging=logging, wait_s=16.0 if "True" in code or "**" in code else 600.0)
    )
    said = unfinished_import(config)
    assert said == f"{tmp_path}/own.py:Own: the import of {tmp_path}/own.py {said.partition('own.py ')[2]}"
    assert said.partition(f"{tmp_path}/own.py ")[2].startswith(says)


def test_an_import_that_comes_to_its_end_is_no_matter(tmp_path):
    """Nor is one that fails: where it is loaded for good says so."""
    (tmp_path / "own.py").write_text(f"import sys; sys.exit('no licence')\n{TRACKER}")
    agents = [agent_table(tmp_path, "a", "qwen3", CHARACTERS)]
    logging = {"metrics": [f"{FILE}:length_of"], "trackers": [f"{tmp_path}/own.py:Own"]}
    assert unfinished_import(load_config(write_config(tmp_path, agents, logging=logging))) is None
    with pytest.raises(ValueError, match=r"own.py:Own: SystemExit while it was loaded: no licence$"):
        named_function(f"{tmp_path}/own.py:Own")
