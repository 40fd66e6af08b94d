"""Advantages, objectives, numbers and trackers of the user's own, named in the configuration."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hacpo_kernels import objective_stats
from method_cases import answers_of, judged, sequence_objective
from repository import ROOT
from run_cases import CHARACTERS, agent_table, write_config

from hacpo_mega.agent.policy_loss import PolicyLoss, outside_band
from hacpo_mega.algorithm import CapabilityTracker, learning_of, objective_loss, reads_skills, skill_tally
from hacpo_mega.config import AlgorithmConfig, load_config
from hacpo_mega.config.user_code import function_problem, named_function, takes_record, unfinished_import
from hacpo_mega.records import MicroBatch, Sample

FILE = ROOT / "tests" / "support" / "own_code.py"
REWARDS_PNG = torch.tensor([[[1.0, 0.0], [0.5, math.nan]], [[0.0, 0.0], [1.0, 0.25]]], dtype=torch.float64)
EQUAL_N = torch.ones(2)


def test_own_advantages_are_what_is_trained():
    config = AlgorithmConfig(method="naive", advantages=f"{FILE}:own_mean")
    learning = learning_of(judged(REWARDS_PNG, EQUAL_N, 0), config)
    assert learning.advantages_PNG.tolist() == [[[0.5, -0.5], [0.0, 0.0]], [[0.0, 0.0], [0.375, -0.375]]]
    assert learning.trains_PNG.tolist() == [[[True, True], [False, False]], [[False, False], [True, True]]]


def test_what_own_functions_change_in_place_stays_theirs():
    """Each learner's advantages are of the lane's answers as judged, and statistics of the packed answers as packed."""
    config = AlgorithmConfig(method="naive", advantages=f"{FILE}:others_successes")
    whole = replace(judged(REWARDS_PNG, EQUAL_N, 1), num_tokens_PNG=torch.ones(2, 2, 2, dtype=torch.int64))
    learning = learning_of(whole, config)
    assert learning.advantages_PNG.tolist() == [[[1, 0], [0, 0]], [[0, 0], [0, 0]]]
    assert learning.wanted_PG.tolist() == [[False, False], [True, False]]
    assert whole.successes_PNG.sum() == 2 and whole.num_tokens_PNG.sum() == 8
    logprob_R = torch.full((10,), -1.0, dtype=torch.float64, requires_grad=True)
    _, (_, advantage_B, is_self_B, _), (_, terms) = packed(logprob_R, "in_place")
    assert terms.weight_B.tolist() == [-1.0] * 4
    assert terms.advantage_B.tolist() == advantage_B.tolist() == [1.0, 0.5, -2.0, 1.5]
    assert terms.is_self_B.tolist() == is_self_B.tolist() == [True, False, True, False]


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


def report_of(advantage_B: list[float], seed: int = 0, **options):
    """The report of a first update on answers of 7 tokens, scored by the learner's log-probs; every third is own."""
    generator = np.random.default_rng(seed)
    old = generator.normal(-1.0, 0.5, (len(advantage_B), 7)).astype(np.float32)
    samples = tuple(
        Sample(
            prompt_ids=np.zeros(1, np.int32),
            answer_ids=np.zeros(7, np.int32),
            num_trained=7,
            source=0 if b % 3 == 0 else 1,
            is_self=b % 3 == 0,
            prompt_index=b,
            rollout_index=0,
            advantage=advantage,
            source_logprob=float(np.float32(old[b].astype(np.float64).mean())),
            length=7.0,
            old_logprobs=old[b],
        )
        for b, advantage in enumerate(advantage_B)
    )
    starts, none = torch.arange(0, old.size + 1, 7, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    batch = MicroBatch(none, none, starts, none, none, none, starts, samples, old.size)
    tokens = torch.from_numpy(old.ravel().copy()).requires_grad_()
    return PolicyLoss(0, 1.0, AlgorithmConfig(**options), reference={})(tokens, batch)[1]


@pytest.mark.parametrize(
    "options",
    [
        {"method": "naive", "objective": f"{FILE}:clipped"},
        {"method": "sgt", "ratio_level": "token"},
        {"method": "f_tis", "ratio_level": "token"},
    ],
)
def test_an_answer_without_advantage_is_not_clipped(options):
    """A KL trains such answers; under an objective that autograd differentiates, as under the kernels'."""
    report = report_of([0.0] * 6 + [1.0, 0.5, 0.0], **options)
    stats = objective_stats(report.terms)
    fused = objective_stats(report_of([0.0] * 6 + [1.0] * 3, method="naive").terms)
    for name in ("clipped_self", "cross_below", "cross_inside", "cross_above"):
        assert getattr(stats, name).tolist() == getattr(fused, name).tolist()
    assert stats.clipped_self.tolist() == [0, 3] and stats.cross_inside.tolist() == [6, 6]
    assert not outside_band(SimpleNamespace(reports=[report]))


def test_an_answer_that_is_pulled_against_its_advantage_is_trained():
    report = report_of([1.0, -0.5, 2.0] * 3, method="naive", objective=f"{FILE}:against")
    stats = objective_stats(report.terms)
    assert report.terms.weight_B.tolist() == pytest.approx([-1.0] * 9)
    assert stats.clipped_self.tolist() == [0, 3] and stats.cross_inside.tolist() == [6, 6]
    assert not outside_band(SimpleNamespace(reports=[report]))


@pytest.mark.parametrize("seed", range(4))
def test_an_unchanged_policy_has_a_ratio_of_1_under_an_own_objective(seed):
    report = report_of([1.0] * 12, seed, method="naive", objective=f"{FILE}:clipped")
    assert report.terms.ratio_B.tolist() == [1.0] * 12


def test_an_objective_that_the_policy_does_not_enter_is_refused():
    with pytest.raises(ValueError, match="does not depend on log_ratio_B or logprob_R"):
        packed(torch.zeros(10, dtype=torch.float64, requires_grad=True), "flat")


def test_an_objective_that_needs_the_sources_tokens_is_refused():
    """Its NaN would have every update skipped, by a gradient norm that says nothing of tokenizers."""
    with pytest.raises(ValueError, match="by_token returned NaN for an answer without old_logprob_R"):
        packed(torch.zeros(10, dtype=torch.float64, requires_grad=True), "by_token")
    broken = torch.zeros(10, dtype=torch.float64).fill_(math.nan).requires_grad_()
    _, _, (loss_B, _) = packed(broken, "by_token")
    assert loss_B.isnan().all(), "a model that broke is skipped, and named by other means"


def test_an_objective_gets_source_prompt_length_and_step_of_each_answer():
    """Two answers of 2 and 3 tokens, own and of agent 1, in update 2 of step 3 of 7; the loss by hand."""
    samples = tuple(
        Sample(
            prompt_ids=np.zeros(1, np.int32),
            answer_ids=np.zeros(length, np.int32),
            num_trained=length,
            source=source,
            is_self=source == 0,
            prompt_index=4 + source,
            rollout_index=0,
            advantage=0.5,
            source_logprob=-1.0,
            length=float(length),
            old_logprobs=np.full(length, -1.0, np.float32) if source == 0 else None,
        )
        for source, length in enumerate((2, 3))
    )
    starts, none = torch.tensor([0, 2, 5], dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    batch = MicroBatch(none, none, starts, none, none, none, starts, samples, 5)
    tokens = torch.tensor([-0.5, -1.0, -1.25, -1.25, -1.25], requires_grad=True)
    config = AlgorithmConfig(method="naive", objective=f"{FILE}:of_columns")
    loss, report = PolicyLoss(2, 0.5, config, reference={}, step=3, num_steps=7)(tokens, batch)
    more = 2000 + 30000 + 7_000_000
    factors = 0 + 40 + 200 + more, 1 + 50 + 300 + more
    by_hand = [0.25 * factors[0], -0.25 * factors[1]]
    assert loss.item() == pytest.approx(0.5 * sum(by_hand), rel=2.0**-20)  # a float32 of two numbers that nearly cancel
    assert report.terms.loss_B.tolist() == pytest.approx(by_hand, rel=2.0**-50)
    assert report.terms.weight_B.tolist() == pytest.approx([-factor / 0.5 for factor in factors], rel=2.0**-50)


def test_advantages_get_the_capability_of_each_skill_and_the_step():
    """Two steps of prompts of skills "" and add; agent 1 has no judged answer of add in the window's first step."""
    config = AlgorithmConfig(method="naive", advantages=f"{FILE}:by_skill", capability_window=2)
    assert reads_skills(config) and not reads_skills(AlgorithmConfig(method="naive", advantages=f"{FILE}:own_mean"))
    tracker, skill_P = CapabilityTracker(2, config, ("", "add")), torch.tensor([0, 1])
    steps = [
        torch.full((2, 2, 2), 1.0),
        REWARDS_PNG,
        torch.tensor([[[1.0, 1.0], [0.0, 0.0]], [[0.5, 1.0], [math.nan] * 2]]),
    ]
    for rewards_PNG in steps:  # the first leaves the window
        tracker.add_skills(skill_tally(rewards_PNG.double(), rewards_PNG == 1.0, skill_P, 2))
    capability_NS, judged_NS = tracker.skill_values()
    assert capability_NS.tolist() == [[3 / 4, 1.5 / 4], [0.5 / 3, 1.25 / 2]]  # "": 1, 0 and 1, 1; .5 and 0, 0
    assert judged_NS.tolist() == [[4, 4], [3, 2]]
    by_success = CapabilityTracker(2, config.model_copy(update={"capability_metric": "positive_rate"}), ("", "add"))
    by_success.load_state_dict(tracker.state_dict())
    assert by_success.skill_values()[0].tolist() == [[3 / 4, 1 / 4], [0 / 3, 1 / 2]]
    again = CapabilityTracker(2, config, ("", "add", "sub"))
    again.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    assert torch.equal(again.skill_values()[0][:, :2], capability_NS) and again.skill_values()[1][:, 2].tolist() == [
        0,
        0,
    ]
    known = {"skill_P": skill_P, "skill_capability_NS": capability_NS, "step": 3, "num_steps": 4}
    learning = learning_of(replace(judged(REWARDS_PNG, EQUAL_N, 1), **known), config)
    own, add = (1 - 0.75) / 4, (1 - 0.625) / 4  # a quarter of the run is left, R - .1666 and R - .625
    assert learning.advantages_PNG[1].tolist() == [[-0.625 / 4, -0.625 / 4], [add, (0.25 - 0.625) / 4]]
    assert learning.advantages_PNG[0, 0].tolist() == pytest.approx([(1 - 0.5 / 3) / 4, -0.5 / 12], rel=1e-15)
    assert own == 0.0625 and learning.own_P.all()


@pytest.mark.parametrize("key", ["advantages", "objective"])
def test_a_function_of_other_parameters_is_one_line(tmp_path, key):
    (tmp_path / "made.py").write_text("import functools\ntwo = functools.partial(lambda a, b: a)\n")
    with pytest.raises(
        ValueError, match=rf"\Aalgorithm\.{key}: '.*made.py:two' takes \(a, b\); algorithm\.{key} takes "
    ):
        takes_record(key, f"{tmp_path}/made.py:two")  # of which only its call tells
    assert f"takes 2 arguments; algorithm.{key} takes one, the record " in function_problem(
        key, f"{FILE}:two_arguments"
    )


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"algorithm": {"advantages": f"{FILE}:own_meen"}}, "has no function 'own_meen'; did you mean 'own_mean'?"),
        (
            {"algorithm": {"advantages": f"{FILE}:clipped"}},
            "takes 4 arguments; algorithm.advantages takes one, the record Judged",
        ),
        ({"algorithm": {"advantages": f"{FILE}:two_arguments"}}, "takes 2 arguments; algorithm.advantages takes one"),
        ({"algorithm": {"objective": f"{FILE}:own_mean"}}, "takes 3 arguments; algorithm.objective takes one"),
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
