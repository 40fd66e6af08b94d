"""What a publication costs on CPUs: `python tests/support/publish_benchmark.py [FOLDER]`.

A Qwen3-shaped model of 130 million parameters in float32 with random weights, written to FOLDER (build/publish) when it
is not there. For each layout, of every rank of one cell: processor seconds of the last of three publications, through
full tensors (as before: gathered, and loaded by vLLM) and shard to shard, of comparing checksums, and bytes sent.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from job import TIMEOUT_S, run_script
from tiny_models import make_model

from hacpo_mega.agent.publication import Publication
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.models.layout import Layout
from hacpo_mega.rollout.engine import Engine

SIZES = {
    "num_layers": 10, "hidden_size": 768, "num_heads": 12, "num_kv_heads": 4, "head_dim": 64, "ffn_size": 2304,
    "vocab_size": 40000, "tied": False,
}  # fmt: skip
# tp, pp, ranks of an engine
LAYOUTS = ((1, 1, 1), (2, 1, 2), (2, 1, 1), (1, 2, 1), (1, 2, 2))


def main(folder: Path, out: Path, tp: int, pp: int, engine_tp: int) -> None:
    """On every rank."""
    with Place.join(RankMap(1, (AgentShape("one", tp, pp, 1, engine_tp),)), TIMEOUT_S) as place:
        options = {"optimizer": OptimizerConfig(), "total_updates": 1, "max_tokens_per_microbatch": 64}
        actor = Actor(folder, layout=Layout(tp, pp), max_positions=64, spans=place.spans, **options)
        engine = Engine(
            folder, max_model_len=64, dtype=torch.float32, tensor_parallel_size=engine_tp, random_weights=True,
            options={"kv_cache_memory_bytes": 64 << 20},
        )  # fmt: skip
        start = time.process_time()
        publication = Publication(place, actor, engine)
        planned = time.process_time() - start
        gathered = measured(place, lambda: [None for _ in actor.weights()])
        before = measured(place, lambda: engine.load(actor.weights()))
        after = measured(place, publication.publish)
        compared = measured(place, lambda: differ(publication))
        row = "  ".join(f"{s:6.2f} s {mib:8.2f} MiB" for s, mib in [gathered, before, after, compared])
        (out / f"{place.coordinate.cell_rank}.txt").write_text(f"{planned:6.2f} s  {row}")
        engine.close()


def differ(publication: Publication) -> None:
    """Nothing does."""
    assert publication.differences() == []


def measured(place: Place, action: Callable[[], object]) -> tuple[float, float]:
    """Processor seconds of the last of three, and MiB that it sent to other ranks."""
    for _ in range(3):
        place.spans.take_sent()
        place.barrier()
        start = time.process_time()
        action()
        seconds = time.process_time() - start
    sent = sum(size for (_, whom), size in place.spans.take_sent().items() if whom in ("tp", "pp", "cell"))
    return seconds, sent / 2**20


if __name__ == "__main__":
    model = Path(sys.argv[1] if len(sys.argv) > 1 else "build/publish")
    if not (model / "config.json").exists():
        make_model(model, "qwen3", **SIZES)
    print("processor seconds and MiB sent, of each rank: plan; gather; gather and load; shard to shard; compare")
    for layout in LAYOUTS:
        results = model / "-".join(map(str, layout))
        results.mkdir(exist_ok=True)
        run_script("publish_benchmark", layout[0] * layout[1], model.resolve(), results.resolve(), *layout)
        for file in sorted(results.glob("*.txt")):
            print(f"tp {layout[0]} pp {layout[1]} -> engines of {layout[2]}, rank {file.stem}: {file.read_text()}")
