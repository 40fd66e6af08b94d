"""torch's grouped product on CUDA is the loop over experts."""

import pytest
import torch
from expert_products import COUNTS, compare_products

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("counts", COUNTS)
def test_the_grouped_product_is_the_loop(counts):
    compare_products(COUNTS[counts], torch.bfloat16, "cuda")
