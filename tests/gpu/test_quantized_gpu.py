"""Engines on a GPU that quantize what is published: what a fresh load makes, verified, and the policy up to fp8."""

import pytest
import torch
from job import run_script
from tiny_models import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SIZES = {"hidden_size": 256, "num_heads": 4, "head_dim": 64, "ffn_size": 512, "tied": False, "dtype": torch.bfloat16}


@pytest.mark.parametrize("kind", ["fp8", "fp8_per_channel", "fp8_per_block"])
def test_what_is_published_is_what_a_fresh_load_makes(kind, tmp_path):
    folder = make_model(tmp_path / "model", "qwen2", **SIZES)
    run_script("quantized_job", 1, folder, tmp_path, kind, 1, 1, 1, 0)
    seen = torch.load(tmp_path / "0.pt", weights_only=False)
    assert seen["left over"] == {}
    assert seen["differences"] == [[], []] and seen["behind"] and seen["mended"] == []
    name, found = seen["flipped"]
    assert found == [f"{name}: not what a fresh load of the actor's weights makes"]
    assert all(0 < gap < 0.25 for gaps in seen["gaps"] for gap in gaps)
