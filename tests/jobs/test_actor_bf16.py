"""The actor as CUDA trains it, with bf16 weights, on the CPU: first ratios stay exactly 1 at every layout."""

import pytest
import torch
from actor_cases import make_actor, one_rank
from bf16_cases import BF16, check_gradient, check_own_ratios, gradient, make_folder, own_ratios
from job import run_group

pytestmark = pytest.mark.nightly
# Of two ranks: tensor parallel, pipeline, two that share tokens, two cells.
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def on_two_ranks(folder):
    return run_group(2, visit_layouts, folder)


def visit_layouts(folder):
    return {layout: visit(folder, **dict(zip(("tp", "pp", "cp"), layout, strict=True))) for layout in LAYOUTS}


def visit(folder, **layout):
    return own_ratios(folder, 60, **layout), gradient(folder, 60, **layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_ratio_of_a_steps_first_update_is_exactly_one(on_two_ranks, layout):
    for seen in on_two_ranks:
        check_own_ratios(seen[layout][0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_is_hugging_faces_up_to_bf16(on_two_ranks, folder, layout):
    check_gradient(on_two_ranks[0][layout][1], folder)


def test_products_of_bf16_are_added_in_float32(folder):
    """cuBLAS may add the parts of a split product in bf16, where torch's default lets it."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    with one_rank():
        make_actor(folder, dtype=BF16)
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is False
