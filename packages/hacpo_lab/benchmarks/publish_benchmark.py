"""The cost of a publication on CPUs: `python publish_benchmark.py [MODEL] [FOLDER]`.

MODEL, one of MODELS, has random weights in float32 and is written to FOLDER (build/publish-MODEL) when it is not there.
For each layout and every rank of a cell, by phase, shard to shard and through full tensors (gathered, and loaded by
vLLM): processor seconds, of three publications that of the median; how far the resident set rises above what it was
before; bytes that are written to memory, over those of the model. Each has publications of its own.

    plan    vLLM's loaders are followed and the plan is made, once
    copy    from the actor to the engine; out of messages, too, and whatever is in no other phase of the exchange
    send    messages are packed, sent and waited for, by gloo's threads, too
    load    vLLM packs what has come; of full tensors: cuts and packs it
    gather  full tensors are made
    rest    the engine forgets cached prefixes, and ranks say that they are done
"""

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.extend(str(Path(__file__).resolve().parents[3] / "tests" / "support" / folder) for folder in ("", "cases"))

from job import TIMEOUT_S, run_script
from megatron.core import parallel_state
from tiny_models import make_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hacpo_lab.throughput.memory_peak import take_peak
from hacpo_mega.agent.weight_sync import WeightSync
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.actor import Actor, ActorHooks, ActorSpec
from hacpo_mega.megatron.weights import publish
from hacpo_mega.models.sharding.layout import Layout
from hacpo_mega.rollout.engine import Engine
from hacpo_mega.rollout.vllm.engine_spec import EngineSpec
from hacpo_mega.rollout.weights.engine_weights import EngineWeights

# Name -> family and sizes, and layouts: tp, pp, ranks of an engine.
MODELS = {
    "0.1b": (
        {
            "family": "qwen3", "num_layers": 10, "hidden_size": 768, "num_heads": 12, "num_kv_heads": 4, "head_dim": 64,
            "ffn_size": 2304, "vocab_size": 40000, "tied": False,
        },
        ((1, 1, 1), (2, 1, 2), (2, 1, 1), (1, 2, 1), (1, 2, 2)),
    ),
    # Qwen2.5-0.5B's
    "0.5b": (
        {
            "family": "qwen2", "num_layers": 24, "hidden_size": 896, "num_heads": 14, "num_kv_heads": 2, "head_dim": 64,
            "ffn_size": 4864, "vocab_size": 151936, "tied": True,
        },
        ((1, 1, 1),),
    ),
}  # fmt: skip
PHASES = {"shard to shard": ("copy", "send", "load", "rest"), "full tensors": ("gather", "load", "rest")}


class Phases:
    """Adds up what is counted by phase: an inner phase's is not its outer one's."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._now, self._turn = "rest", lambda _: None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._turn(self._now)
        before, self._now = self._now, name
        try:
            yield
        finally:
            self._turn(name)
            self._now = before

    def inside(self, owner: object, name: str, phase: str) -> None:
        """From now on the function of this name is a phase."""
        function = getattr(owner, name)

        def timed(*arguments, **options):
            with self.phase(phase):
                return function(*arguments, **options)

        setattr(owner, name, timed)

    def gathered(self, weights: Iterator) -> Iterator:
        """The same tensors; making them is a phase."""
        while True:
            with self.phase("gather"):
                item = next(weights, None)
            if item is None:
                return
            yield item

    def counted(self, action: Callable[[], object], turn: Callable[[str], None]) -> Counter[str]:
        """The counts that `turn`, told of the phase that ends, has put into `found`."""
        self.found, self._turn = Counter(), turn
        action()
        turn(self._now)
        self._turn = lambda _: None
        return self.found

    def seconds(self, action: Callable[[], object]) -> Counter[str]:
        """The seconds of the processor, on all threads of this process."""
        last = time.process_time()

        def turn(name: str) -> None:
            nonlocal last
            last, begin = time.process_time(), last
            self.found[name] += last - begin

        return self.counted(action, turn)

    def rises(self, action: Callable[[], object]) -> Counter[str]:
        """MiB of the resident set beyond what it was before, at the most."""
        take_peak()
        before = take_peak()

        def turn(name: str) -> None:
            self.found[name] = max(self.found[name], (take_peak() - before) / 2**20)

        return self.counted(action, turn)

    def writes(self, action: Callable[[], object]) -> Counter[str]:
        """Bytes that operations write."""
        mode = Written()

        def turn(name: str) -> None:
            self.found[name] += mode.size
            mode.size = 0

        with mode:
            return self.counted(action, turn)


class Written(TorchDispatchMode):
    """Counts bytes: of tensors that are changed in place, made anew with numbers, received, or packed by vLLM."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [*args, *(kwargs or {}).values()]
        self.size += sum(leaf.nbytes for leaf in tree_leaves(_written(func, given, result)) if torch.is_tensor(leaf))
        return result


def _written(func, given: list, result: object) -> object:
    name = func._schema.name
    if name.startswith("c10d::"):
        is_root = name == "c10d::broadcast_" and given[2] == parallel_state.get_pipeline_model_parallel_rank()
        return None if is_root or name in ("c10d::send", "c10d::barrier") else given[0]
    if name.startswith("_C::"):  # makes a packed copy that only its handle knows
        return given if not torch.is_tensor(result) else result
    changed = [
        value for said, value in zip(func._schema.arguments, given) if said.alias_info and said.alias_info.is_write
    ]
    if changed or "empty" in name:
        return changed
    return None if any(said.alias_info for said in func._schema.returns) else result


def main(folder: Path, out: Path, tp: int, pp: int, engine_tp: int) -> None:
    """On every rank."""
    with Place.join(RankMap(1, (AgentShape("one", tp, pp, 1, engine_tp),)), TIMEOUT_S) as place:
        options = {"optimizer": OptimizerConfig(), "total_updates": 1, "max_tokens_per_microbatch": 64}
        actor = Actor(folder, ActorSpec(layout=Layout(tp, pp), max_positions=64, **options), ActorHooks(place.spans))
        spec = EngineSpec(
            folder, max_model_len=64, dtype=torch.float32, tensor_parallel_size=engine_tp, random_weights=True,
            options={"kv_cache_memory_bytes": 64 << 20},
        )  # fmt: skip
        engine = Engine(spec)
        phases = Phases()
        planned = {"seconds": phases.seconds(lambda: WeightSync(place, actor, engine))["rest"]}
        planned["rises"] = phases.rises(lambda: WeightSync(place, actor, engine))["rest"]
        weight_sync = WeightSync(place, actor, engine)
        phases.inside(publish, "_write", "copy")
        phases.inside(publish.Exchange, "run", "copy")
        phases.inside(publish.Exchange, "_start", "send")
        phases.inside(publish._Arrivals, "unpack", "send")
        phases.inside(EngineWeights, "finish", "load")

        def load() -> None:
            with phases.phase("load"):
                engine.load(phases.gathered(actor.weights()))

        found = {"plan": planned}
        for way, action in {"full tensors": load, "shard to shard": weight_sync.publish}.items():
            found[way] = measured(place, phases, action)
        start = time.process_time()
        assert weight_sync.differences() == []
        found["compare"] = time.process_time() - start
        found["model"] = sum(tensor.nbytes for _, tensor in actor.weights())
        (out / f"{place.coordinate.cell_rank}.json").write_text(json.dumps(found))
        engine.close()


def measured(place: Place, phases: Phases, action: Callable[[], object]) -> dict:
    """By phase; and MiB that this rank sent to others."""
    timed = []
    for _ in range(4):  # the first is not counted
        place.barrier()
        place.spans.take_sent()
        timed.append(phases.seconds(action))
        sent = sum(size for (_, whom), size in place.spans.take_sent().items() if whom in ("tp", "pp", "cell"))
    place.barrier()
    rises = phases.rises(action)
    place.barrier()
    median = statistics.median_low(sum(seconds.values()) for seconds in timed[1:])
    (seconds,) = [seconds for seconds in timed[1:] if sum(seconds.values()) == median][:1]
    return {"seconds": seconds, "rises": rises, "writes": phases.writes(action), "sent": sent / 2**20}


def row(found: dict) -> Iterator[str]:
    """The lines that are printed of a rank."""
    plan = found["plan"]
    yield f"    plan {plan['seconds']:.2f} s, +{plan['rises']:.0f} MiB; compare {found['compare']:.2f} s"
    for way, names in PHASES.items():
        of_way = found[way]
        parts = [
            f"{name} {of_way['seconds'].get(name, 0):.2f} s +{of_way['rises'].get(name, 0):.0f} MiB "
            f"{of_way['writes'].get(name, 0) / found['model']:.2f} M"
            for name in names
        ]
        total = f"{sum(of_way['seconds'].values()):.2f} s +{max(of_way['rises'].values()):.0f} MiB "
        total += f"{sum(of_way['writes'].values()) / found['model']:.2f} M"
        yield f"    {way}: {total}, sent {of_way['sent']:.2f} MiB ({'; '.join(parts)})"


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "0.1b"
    sizes, layouts = MODELS[name]
    model = Path(sys.argv[2] if len(sys.argv) > 2 else f"build/publish-{name}")
    if not (model / "config.json").exists():
        make_model(model, **sizes)
    for layout in layouts:
        results = model / "-".join(map(str, layout))
        results.mkdir(exist_ok=True)
        run_script("publish_benchmark", layout[0] * layout[1], model.resolve(), results.resolve(), *layout)
        for file in sorted(results.glob("*.json")):
            found = json.loads(file.read_text())
            print(
                f"tp {layout[0]} pp {layout[1]} -> engines of {layout[2]}, rank {file.stem}, M = {found['model']} bytes"
            )
            print(*row(found), sep="\n", flush=True)
