"""Experts over several cells, each with its own number of micro-batches, or none: as Hugging Face has them in one.

jobs/test_experts.py looks at experts inside a cell, test_expert_options.py at what is stored, test_expert_run.py at a
whole run of two such cells, test_publish_exchange.py at what their engines are given.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from actor_cases import LOGPROB_ERROR, gradient_by_descent, make_actor, norm, objective
from job import run_group
from safetensors.torch import load_file
from test_expert_options import COMMUNICATION
from test_experts import AGREED, SAMPLES, expected, folders, worst

from hacpo_mega.agent.policy_loss import REPORTS, PolicyLoss, ratios_by_key
from hacpo_mega.config import AlgorithmConfig

__all__ = ("expected", "folders")  # fixtures

pytestmark = pytest.mark.nightly

NUM_RANKS, MAX_TOKENS = 4, 32
# tp, pp, ep: what a cell has of four ranks, and how many of all its cells' share experts
LAYOUTS = [(2, 1, 4), (1, 1, 4), (1, 2, 2)]
EACH = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
# Recomputation must change no bit, and neither must the plain options a second time.
OPTIONS = {"plain": {}, "again": {}, "recomputed": {"recompute": "full"}}


@pytest.fixture(scope="module")
def seen(folders, tmp_path_factory) -> dict[tuple, list[dict]]:
    """layout -> what every rank saw."""
    answers = run_group(NUM_RANKS, visit_layouts, folders["qwen3_moe"], tmp_path_factory.mktemp("exports"))
    return {layout: [answer[layout] for answer in answers] for layout in LAYOUTS}


def visit_layouts(folder: Path, exports: Path) -> dict[tuple, dict]:
    return {layout: visit(folder, layout, exports / f"{layout}") for layout in LAYOUTS}


def dealt(cells: int, cell: int, *, first_has_some: bool) -> list[int]:
    """Places in SAMPLES of what a cell has: the last all but a prompt or two, the first at most one."""
    owner = [cells - 1] * len(SAMPLES)
    for place, sample in enumerate(SAMPLES):
        if sample.prompt_index == 0:
            owner[place] = 0 if first_has_some else cells - 1
        elif sample.prompt_index < cells - 1:
            owner[place] = sample.prompt_index
    return [place for place in range(len(SAMPLES)) if owner[place] == cell]


def visit(folder: Path, layout: tuple[int, int, int], export: Path) -> dict:
    tp, pp, ep = layout
    cells = NUM_RANKS // (tp * pp)
    cell = dist.get_rank() // (tp * pp)
    options = {"tp": tp, "pp": pp, "ep": ep, "max_tokens_per_microbatch": MAX_TOKENS}
    actor = make_actor(folder, **options, reports=REPORTS)
    actor.save_hf(export)
    some = dealt(cells, cell, first_has_some=True)
    scores = dict(zip(some, actor.token_logprobs([SAMPLES[place] for place in some]), strict=True))
    # An update packs own answers by themselves, and others' follow; cells have unequal numbers of both.
    own = [SAMPLES[place] for place in some if SAMPLES[place].is_self]
    others = [SAMPLES[place] for place in some if not SAMPLES[place].is_self][cell:]
    scored = [dataclasses.replace(s, source_logprob=score.mean_logprob) for s, score in zip(own, actor.score(own))]
    stats = actor.learn([*scored, *others], PolicyLoss(0, 1.0, AlgorithmConfig(), reference={}))
    ratios = [ratio for (_, source, _), ratio in ratios_by_key(stats).items() if source == 0]
    found = {"scores": scores, "ratios": ratios, "batches": (stats.num_microbatches, len(stats.reports))}
    found["export"] = export
    actor = make_actor(folder, **options, communication=COMMUNICATION["meanwhile"])
    found["meanwhile"], _ = gradient_by_descent(actor, lambda: actor.learn([SAMPLES[n] for n in some], objective))
    mine = [SAMPLES[place] for place in dealt(cells, cell, first_has_some=False)]
    for name, more in OPTIONS.items():
        actor = make_actor(folder, **options, **more)
        gradient, stats = gradient_by_descent(actor, lambda actor=actor: actor.learn(mine, objective))
        found[name] = gradient, stats.loss, stats.grad_norm, stats.num_microbatches
    return found


@EACH
def test_scores_are_hugging_faces(seen, expected, layout):
    found = [pair for rank in seen[layout] for pair in rank["scores"].items()]
    assert {place for place, _ in found} == {*range(len(SAMPLES))}
    for place, logprobs in found:
        np.testing.assert_allclose(logprobs, expected["qwen3_moe"][0][place], rtol=0, atol=LOGPROB_ERROR)


@EACH
def test_gradients_and_their_norm_are_hugging_faces(seen, expected, layout):
    """The first cell has no micro-batch and the last has most of them."""
    counts = [rank["plain"][3] for rank in seen[layout]]
    assert counts[0] == 0 and counts[-1] > 5
    for rank in seen[layout]:
        gradient, _, grad_norm, _ = rank["plain"]
        assert worst(gradient, expected["qwen3_moe"][1])[0] < AGREED
        assert grad_norm == pytest.approx(norm(expected["qwen3_moe"][1]), rel=AGREED)
        assert worst(rank["meanwhile"], expected["qwen3_moe"][1])[0] < AGREED, "of cells that all have some"


@EACH
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "plain"])
def test_no_bit_changes(seen, layout, name):
    for rank in seen[layout]:
        (gradient, *numbers), (plain, *its_numbers) = rank[name], rank["plain"]
        assert numbers == its_numbers
        assert all(torch.equal(gradient[tensor], plain[tensor]) for tensor in plain)


@EACH
def test_the_own_ratio_of_a_first_update_is_1(seen, layout):
    """Also where a cell is done with its own answers while another goes on."""
    assert len({rank["batches"] for rank in seen[layout]}) > 1
    for rank in seen[layout]:
        assert rank["batches"][0] == rank["batches"][1], "nothing is reported of empty ones"
        assert rank["ratios"] and set(rank["ratios"]) == {1.0}


@EACH
def test_an_export_is_the_loaded_folder(folders, seen, layout):
    export = seen[layout][0]["export"]
    loaded, written = (load_file(folder / "model.safetensors") for folder in (folders["qwen3_moe"], export))
    assert written.keys() == loaded.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in written.items())
