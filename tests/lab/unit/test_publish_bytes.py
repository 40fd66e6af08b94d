"""The least that a publication can move, by hand, and what `hacpo-mega plan` prints of it.

jobs/test_publish_exchange.py counts the same bytes on the wire, unit/models/test_publish_plan.py number by number.
"""

import json

import pytest
from plan_bytes import moved_bytes
from plan_cases import write_cluster, write_small_job
from publish_cases import MODELS, STAGES, each_case, plan_of
from typer.testing import CliRunner

from hacpo_lab.planning.publication import published
from hacpo_lab.planning.publish_bytes import least_received, whole_tensors
from hacpo_mega.cli.app import app
from hacpo_mega.models.public import public_architecture
from hacpo_mega.models.sharding.layout import Layout, stage_layers

HIDDEN, FFN, KV, VOCAB, LAYERS = 4096, 14336, 1024, 128256, 32
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * FFN
# Layout -> eighths of all matrices, embedding and head among them, that each rank of a cell receives.
EIGHTHS = {
    (2, 1, 1, 2): (0, 0),
    (2, 1, 1, 1): (4, 4),
    (1, 1, 2, 1): (4, 4),
    (1, 1, 2, 2): (2, 2),
    (2, 1, 2, 4): (1, 2, 2, 1),
    (2, 2, 1, 2): (0, 0, 0, 0),
    (2, 1, 4, 2): (3,) * 8,
}


@pytest.mark.parametrize("tp, cp, pp, engine_tp", EIGHTHS)
def test_the_least_by_hand(tp, cp, pp, engine_tp):
    """Llama 3.1 8B, whose vocabulary needs no padding; every stage has as many layers, and norms beside them."""
    model, layout = public_architecture("meta-llama/Llama-3.1-8B"), Layout(tp=tp, pp=pp, cp=cp)
    matrices = LAYERS * LAYER + 2 * VOCAB * HIDDEN
    received = least_received(model, layout, engine_tp)
    assert received == published(model, tp, stage_layers(LAYERS, layout), engine_tp, cp).received
    for rank, eighths in enumerate(EIGHTHS[tp, cp, pp, engine_tp]):
        stage = rank // (tp * cp)
        of_norms = (2 * LAYERS * (pp - 1) // pp + (stage < pp - 1)) * HIDDEN
        if pp <= 2:  # the first and the last have a matrix of VOCAB rows each; others would have none
            assert received[rank] == matrices * eighths // 8 + of_norms
        else:
            layers, ends = 3 * LAYERS * LAYER // 8, 2 * VOCAB * HIDDEN // 2
            own = VOCAB * HIDDEN // 2 if stage in (0, pp - 1) else 0
            assert received[rank] == layers + ends - own + of_norms


def test_the_command_prints_what_each_rank_moves_beside_the_least(tmp_path):
    """Two stages of a layer each into one engine over both: half of a layer's matrices and of 256 rows, and norms."""
    job, cluster = write_small_job(tmp_path, pp=2, engine_tp=2), write_cluster(tmp_path)
    out = tmp_path / "plan.json"
    result = CliRunner().invoke(app, ["plan", str(job), "--cluster", str(cluster), "--json", str(out)])
    assert result.exception is None, result.exception
    matrices, norms, rows, last_norm = 36_864 // 2, 2 * 64, 256 // 2 * 64, 64
    first, second = 4 * (matrices + norms + rows), 4 * (matrices + norms + rows + last_norm)
    expected = {"sent": [first, second], "received": [second, first]}
    expected |= {"least": expected["received"], "copied": expected["sent"]}
    assert json.loads(out.read_text())["agents"]["a"]["publish"] == expected | {"whole": {}}
    lines = [line.split() for line in result.output.splitlines()]
    heading = lines.index(["MB", "of", "a", "publish", "by", "rank", "of", "a", "cell"])
    by_rank = zip(*expected.values(), strict=True)
    rows = [[f"{rank}", *(f"{size / 1e6:.1f}" for size in sizes)] for rank, sizes in enumerate(by_rank)]
    assert lines[heading + 1 :][:7] == [
        ["ranks", "sent", "received", "at", "least", "copied", "in", "place"],
        ["a"],
        *rows,
        ["b"],
        *rows,
    ]


def test_the_command_names_what_goes_as_full_tensors(tmp_path):
    """None of a kind that vLLM makes of plain numbers; of another every matrix that may be kept in another form."""
    job, cluster = write_small_job(tmp_path, vllm={"quantization": "torchao"}), write_cluster(tmp_path)
    result = CliRunner().invoke(app, ["plan", str(job), "--cluster", str(cluster)])
    assert result.exception is None, result.exception
    (line,) = [line for line in result.output.splitlines() if line.startswith("a: ") and "published" in line]
    names = [f"model.layers.*.{name}" for name in ("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj")]
    names += [f"model.layers.*.self_attn.{letter}_proj" for letter in "koqv"]
    assert line == (
        f"a: 14 tensors are published whole to every rank: {', '.join(f'{name}.weight' for name in names)}: "
        "its layer may hold it in another form (vllm.quantization = 'torchao')"
    )
    model = public_architecture("meta-llama/Llama-3.1-8B")
    assert whole_tensors(model, {"quantization": "fp8"}) == whole_tensors(model, {}) == {}


@each_case
def test_the_planner_counts_what_the_plan_moves(model, tp, cp, pp, engine_tp, ep):
    """In closed form; and that is the least, counted without a plan."""
    model = MODELS[model]
    plan, counted = plan_of(model, tp, cp, pp, engine_tp, ep), published(model, tp, STAGES[pp], engine_tp, cp, ep)
    assert [4 * n for n in counted.sent] == moved_bytes(plan).sent
    assert [4 * n for n in counted.received] == moved_bytes(plan).received
    ends = {"first_layers": STAGES[pp][0]} if pp == 2 else {}
    least = least_received(model, Layout(tp=tp, pp=pp, cp=cp, ep=ep, **ends), engine_tp)
    assert least == counted.received
    assert [4 * n for n in counted.written] == moved_bytes(plan).written
    pairs = {(piece.source, piece.target) for piece in plan.pieces if piece.crosses}
    assert counted.num_receivers == max([sum(source == rank for source, _ in pairs) for rank in range(plan.num_ranks)])


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B"])
@pytest.mark.parametrize("tp", (1, 2, 4))
def test_nothing_crosses_where_actor_and_engine_are_cut_alike(name, tp):
    assert not any(published(public_architecture(name), tp, (36,), tp).received)


def test_what_crosses_of_a_public_model_by_hand():
    """Llama 3.1 8B, tp 2 into two engines of one rank: each lacks half of every matrix and has every norm."""
    hidden, ffn, kv, vocab = 4096, 14336, 1024, 128256
    matrices = 32 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn) + 2 * vocab * hidden
    moved = published(public_architecture("meta-llama/Llama-3.1-8B"), 2, (32,), 1)
    assert moved.received == moved.sent == (matrices // 2,) * 2
    assert moved.written == (matrices + (2 * 32 + 1) * hidden,) * 2
