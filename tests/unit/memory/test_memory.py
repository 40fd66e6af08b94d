"""The memory budget without torch: what it says of the paper's pairs, what it refuses, and whether its advice helps."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from hacpo_kernels import reference
from hacpo_kernels.linear_logprob import chunk_rows
from paper_models import make_paper_workplace
from repository import ROOT

from hacpo_mega.checkpoint.files import plain
from hacpo_mega.cli import app as cli
from hacpo_mega.config import load_config
from hacpo_mega.config.changes import changes
from hacpo_mega.config.checks import device_memory
from hacpo_mega.config.checks.checks import architecture_of
from hacpo_mega.config.checks.device_memory import ROOM, agent_budget, engine_options, memory_table
from hacpo_mega.memory.actor_bytes import CPU, CUDA, ActorPlan, actor_memory, logit_rows
from hacpo_mega.memory.budget import GIB, PHASES, copies_s
from hacpo_mega.memory.weight_numbers import num_weights
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.public import public_architecture
from hacpo_mega.models.sharding.layout import Layout

PAPER = ROOT / "configs" / "paper"
PAIRS = sorted(file.stem for file in PAPER.glob("*.toml"))
PAIR = PAPER / "qwen-4b-base_qwen-8b-base.toml"
LARGE, SMALL = "agents.qwen-8b-base", "agents.qwen-4b-base"
SHARED = "placement=shared"
GIVEN = "device_memory_gib=80"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("paper")
    make_paper_workplace(folder)
    return folder


@pytest.fixture(autouse=True)
def here(folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)


def budgets_of(file, *overrides):
    config = load_config(file, overrides)
    return {agent.name: agent_budget(config, agent, architecture_of(agent)) for agent in config.agents}


def complaints(*overrides: str, file: Path = PAIR) -> list[str]:
    with pytest.raises(ValueError, match=r".") as error:
        load_config(file, overrides)
    return [line.removeprefix(f"{file}: ") for line in str(error.value).splitlines()]


@pytest.mark.nightly
@pytest.mark.parametrize("pair", PAIRS)
def test_every_pair_of_the_paper_fits_with_room(pair):
    for name, budget in budgets_of(PAPER / f"{pair}.toml").items():
        assert budget.capacity == 79 * GIB
        assert budget.fits(ROOM), (name, budget.fullest, budget.peak / GIB)
        assert not budget.engine_is_too_small
        assert budget.actor.recompute == "none", name


def test_a_pair_that_would_die_in_its_second_update():
    (line,) = complaints(f"{LARGE}.recompute=none", "device_memory_gib=72")
    assert line.startswith(f"{LARGE}: the phase 'learn' needs 72.79 GiB of a device that has 72.00 (device_memory_gib)")
    assert line.endswith("Nearest: recompute = 'mlp' (68.36 GiB)")
    terms = [float(term) for term in re.findall(r" (\d+\.\d+)(?= \+|\. Nearest)", line)]
    assert sum(terms) == pytest.approx(72.79, abs=0.01 * len(terms))
    # It would live through the first: the moments were not there yet.
    budget = budgets_of(PAIR)["qwen-8b-base"]
    assert budget.phases["learn"] - budget.phases["learn, first update"] == budget.parts["moments"]
    assert budget.parts["moments"] == 2 * budget.parts["weights"]  # 8 bytes over two cells, against 2


def test_the_weights_of_a_model_are_those_that_it_has(folder):
    """By hand: Qwen3-8B, as its card says 8.2 billion; a rank of two has half, and all of every norm."""
    a = Architecture.from_folder(folder / "Qwen" / "Qwen3-8B-Base")
    matrices = 4096 * (32 + 8 + 8 + 32) * 128 + 3 * 4096 * 12288
    norms = 2 * 4096 + 2 * 128
    vocabulary = 151_936 * 4096
    assert num_weights(a, Layout()) == 36 * (matrices + norms) + 2 * vocabulary + 4096 == 8_190_735_360
    # Each of the two has half of 151,936 rows, a multiple of 64.
    assert num_weights(a, Layout(tp=2)) == 36 * (matrices // 2 + norms) + vocabulary + 4096
    # The second of two stages: its layers, the final norm, the head.
    assert num_weights(a, Layout(pp=2), stage=1) == 18 * (matrices + norms) + vocabulary + 4096
    # A tied head is the embedding; a last stage that is not the first has a copy.
    tied = replace(a, tied=True)
    assert num_weights(tied, Layout()) == 36 * (matrices + norms) + vocabulary + 4096
    assert num_weights(tied, Layout(pp=2), stage=1) == num_weights(a, Layout(pp=2), stage=1)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        # 40 layers of delta nets and attention, experts in all of them
        ("Qwen/Qwen3.5-35B-A3B", 34_660_610_688),
        # 60 layers with two kinds of heads, each with a scale; the last stage has a copy of the embedding
        ("google/gemma-4-31B-it", 30_697_345_280 + 60 + 262_144 * 5376),
    ],
)
def test_stages_with_layers_of_two_kinds_have_all_weights_together(name, numbers):
    """Transformers' model has as many."""
    a = public_architecture(name)
    assert sum(num_weights(a, Layout(pp=4), stage) for stage in range(4)) == numbers


@pytest.mark.parametrize("columns", [1, 131, 75_968, 128_256, 151_936, 10**7])
def test_chunks_of_logits_are_those_of_the_kernels(columns):
    assert logit_rows(columns, triton=True) == chunk_rows(columns)
    assert logit_rows(columns, triton=False) == reference.chunk_rows(columns)


def test_what_is_recomputed_is_not_kept(folder):
    plan = ActorPlan(Architecture.from_folder(folder / "Qwen" / "Qwen3-8B-Base"), Layout(tp=2), 2, 8192)
    kept = {way: actor_memory(replace(plan, recompute=way)).kept for way in ("none", "mlp", "full")}
    assert [round(kept[way] / GIB, 1) for way in kept] == [20.4, 10.3, 1.2]
    on_cpu = actor_memory(replace(plan, device=CPU))
    assert on_cpu.main_weights == 0 and on_cpu.weights == 2 * actor_memory(plan).weights
    assert on_cpu.kept > 2 * kept["none"]


def test_a_pipeline_keeps_what_it_is_ahead(folder):
    plan = ActorPlan(Architecture.from_folder(folder / "Qwen" / "Qwen3-8B-Base"), Layout(tp=2), 2, 8192)
    first, last = (actor_memory(replace(plan, layout=Layout(2, 4)), stage) for stage in (0, 3))
    assert first.kept == pytest.approx(actor_memory(plan).kept, rel=0.01)  # a quarter of the layers, four times
    assert last.kept == pytest.approx(first.kept / 4, rel=0.02)
    assert first.working < last.working  # which has the head


def test_the_table_adds_up(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hacpo-mega", "check", "--resolved", str(PAIR)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    table = capsys.readouterr().out.split("memory of one process, GiB; 79.00 of a device; * fullest\n")[1]
    table = table.split("\nqwen-4b-base: offload")[0]
    for block in table.split("GFLOP a token learnt\n")[1:]:
        rows = {name: float(size) for name, size in re.findall(r"^(\S.*?) {2,}([\d.]+)\*?$", block, re.MULTILINE)}
        for phase in [name.removeprefix("= ") for name in rows if name.startswith("= ")]:
            parts = [part for part in PHASES[phase] if part != "gradients" or "engine awake" not in PHASES[phase]]
            total = sum(rows.get(part, 0.0) for part in parts)
            assert rows[f"= {phase}"] == pytest.approx(total, abs=0.005 * (len(parts) + 1)), phase
    assert table.count("*") == 2  # the fullest phase of each


# Overrides that do not fit, and how the advice begins.
TOO_MUCH = [
    ((f"{LARGE}.recompute=none", "device_memory_gib=72"), "recompute = 'mlp'"),
    ((f"{LARGE}.vllm.gpu_memory_utilization=0.9",), "vllm.gpu_memory_utilization = "),
    (("device_memory_gib=58",), "tp = 4"),
    ((f"{LARGE}.vllm.kv_cache_memory_bytes=42949672960", f"{LARGE}.offload=none"), "offload = 'optimizer'"),
    (
        (f"{LARGE}.recompute=none", f"{LARGE}.tp=1", "lanes=1", f"{LARGE}.cells_per_lane=8", "device_memory_gib=100"),
        "recompute = ",
    ),
    (("training.max_tokens_per_microbatch=131072", f"{SMALL}.recompute=mlp"), "recompute = 'full'"),
    (("training.max_tokens_per_microbatch=1048576",), "training.max_tokens_per_microbatch = "),
]


@pytest.mark.nightly
@pytest.mark.parametrize("overrides, advice", TOO_MUCH)
def test_what_does_not_fit_is_refused_and_its_advice_helps(overrides, advice):
    lines, taken = complaints(*overrides), []
    for line in lines:
        name, rest = re.match(r"agents\.([\w-]+): (.*)", line).groups()
        key, value = re.search(r"Nearest: ([\w.]+) = ('?\w[\w.]*'?) \(", rest).groups()
        taken.append(f"{key}={value}" if key.startswith("training.") else f"agents.{name}.{key}={value}")
    assert any(f"Nearest: {advice}" in line for line in lines), lines
    for line, override in zip(lines, taken, strict=True):
        agent = line.partition(": ")[0]
        config = PAIR
        try:
            load_config(config, [*overrides, override])
        except ValueError as error:
            left = [other for other in str(error).splitlines() if f"{agent}: the phase" in other]
            assert left == [], override


def test_an_engine_that_answers_while_the_actor_learns_is_in_every_phase():
    """Its share of the device beside all that learning takes; where that does not fit, switching it off may."""
    overrides = (
        "agents.*.cells_per_lane=1",
        f"{LARGE}.tp=8",
        f"{SMALL}.tp=8",
        "agents.*.engine_tp=1",
        "agents.*.recompute=full",
    )
    sleeps, awake = (
        budgets_of(PAIR, *overrides, "agents.*.vllm.gpu_memory_utilization=0.3", f"rollout.one_step_off={on}")[
            "qwen-8b-base"
        ]
        for on in ("false", "true")
    )
    engine = awake.parts["engine awake"]
    assert engine == sleeps.parts["engine awake"]
    for phase in awake.phases:
        rest = {part: awake.parts[part] for part in awake.parts_of(phase) if not part.startswith("engine ")}
        assert awake.phases[phase] == sum(rest.values()) + engine
    assert awake.phases["generate"] - sleeps.phases["generate"] == awake.parts["gradients"] > 0
    assert awake.phases["learn"] > sleeps.phases["learn"]
    lines = complaints(*overrides, "agents.*.vllm.kv_cache_memory_bytes=42949672960", "rollout.one_step_off=true")
    assert any("Nearest: rollout.one_step_off = false (" in line for line in lines), lines


@pytest.mark.nightly
def test_nothing_helps_a_model_that_fits_nowhere():
    lines = complaints("device_memory_gib=4")
    assert len(lines) == 2
    assert all("No share is enough, whatever tp or cp: " in line for line in lines)
    lines = complaints("device_memory_gib=4", "agents.*.vllm.kv_cache_memory_bytes=1")
    assert len(lines) == 2
    assert all("Nearest: " in line or "No single change" in line for line in lines)


def test_an_engine_gets_what_it_cannot_do_without():
    (line,) = complaints(f"{LARGE}.vllm.gpu_memory_utilization=0.1")
    assert "vllm.gpu_memory_utilization (0.1) of 79.00 GiB is 7.90, and the engine needs 9.98" in line
    nearest = re.search(r"Nearest: ([\d.]+)", line)[1]
    assert load_config(PAIR, [f"{LARGE}.vllm.gpu_memory_utilization={nearest}"])


def test_auto_takes_the_least_that_fits():
    def choice(*overrides):
        return budgets_of(PAIR, *overrides)["qwen-8b-base"].actor.recompute

    assert choice() == "none"
    assert choice("device_memory_gib=76") == "mlp"
    assert choice("training.max_tokens_per_microbatch=32768") == "full"
    assert choice(f"{LARGE}.recompute=full") == "full"


@pytest.mark.nightly
def test_offload_gives_the_state_of_the_optimizer_to_the_engine(capsys, monkeypatch):
    """An engine for which the device had no room, and nothing else is on the device in another phase."""
    stays, leaves = (budgets_of(PAIR, *over)["qwen-8b-base"] for over in ((), (f"{LARGE}.offload=optimizer",)))
    state = stays.parts["main weights"] + stays.parts["moments"]
    saved = {phase: size - leaves.phases[phase] for phase, size in stays.phases.items()}
    # Moments are made at the start, for the host to say at once whether it can hold them.
    moved = {"generate": state, "checkpoint": state, "learn, first update": -stays.parts["moments"]}
    assert saved == {phase: moved.get(phase, 0) for phase in PHASES if phase != "diagnose"}
    assert (stays.parts["on the host"], leaves.parts["on the host"]) == (0, state)
    twice = f"{LARGE}.vllm.gpu_memory_utilization=0.6"
    (line,) = complaints(twice, f"{LARGE}.offload=none")
    assert "main weights 7.63 + moments 15.26" in line
    monkeypatch.setattr(sys, "argv", ["hacpo-mega", "check", "--resolved", str(PAIR), twice])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    out = capsys.readouterr().out
    assert re.findall(r"^on the host +(\S+)$", out, re.MULTILINE) == ["22.89"]
    line = "qwen-8b-base: offload = 'optimizer': optimizer state of 22.89 GiB does not fit beside the engine"
    assert line in " ".join(out.split())
    (line,) = complaints(f"{LARGE}.vllm.gpu_memory_utilization=0.9", f"{LARGE}.offload=optimizer")
    assert "phase 'generate'" in line and "moments" not in line


def test_gradients_are_not_beside_the_engine():
    """By hand for 8.19 B numbers, tp 2, two cells: 4 bytes a number and rank; generating takes all the rest."""
    budget = budgets_of(PAIR)["qwen-8b-base"]
    part, numbers = budget.parts, budget.parts["weights"] // 2
    assert part["gradients"] == 4 * numbers
    rest = ("weights", "main weights", "moments", "gather buffer", "engine awake", "context")
    assert budget.phases["generate"] == budget.phases["checkpoint"] == sum(part[name] for name in rest)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "gib, prompts, offloads, words",
    [
        (79, 128, False, "fits beside the engine"),
        (70, 128, False, "the engine has 0.47 of the device, 1.4 s a step of answering against 2.0 s of copies"),
        (64, 128, True, "the engine has 0.5 of the device instead of 0.43, 4.4 s"),
        (64, 64, False, "the engine has 0.43 of the device, 0.0 s a step of answering against 2.0 s of copies"),
    ],
)
def test_auto_offloads_where_a_larger_cache_saves_more_than_copies_cost(gib, prompts, offloads, words):
    """Copies by hand: 12 bytes of 4.1 B numbers over two cells, out and back at 25 GB/s. Few answers need no cache."""
    over = (f"device_memory_gib={gib}", f"training.prompts_per_step={prompts}", f"{LARGE}.vllm={{}}")
    config = load_config(PAIR, over)
    budget = agent_budget(config, config.agents[1], architecture_of(config.agents[1]))
    assert (budget.actor.offloads, words in budget.offload_line) == (offloads, True), budget.offload_line
    assert copies_s(budget) == pytest.approx(2 * 12 * budget.parts["weights"] / 2 / 2 / 25e9)
    assert budget.fits(ROOM) and not budget.engine_is_too_small
    for on_cpu, share in ((False, budget.engine.memory_share), (True, None)):
        with mock.patch.object(device_memory, "is_cpu_build", lambda found=on_cpu: found):
            assert engine_options(config, config.agents[1], budget).get("gpu_memory_utilization") == share


def test_where_nothing_can_leave_auto_offloads_nothing():
    ahead = ("lanes=1", f"{LARGE}.tp=8", f"{SMALL}.tp=8", "agents.*.engine_tp=1", "rollout.one_step_off=true")
    for over in (ahead, ("placement=apart", "agents.*.rollout_gpus=2")):
        budget = budgets_of(PAIR, *over, "agents.*.vllm.gpu_memory_utilization=0.25")["qwen-8b-base"]
        assert not (budget.actor.offloads or budget.frees_gradients or budget.offload_line)
        assert "gradients" in budget.parts_of("checkpoint")


def test_an_engine_that_never_sleeps_has_the_share_that_its_actor_leaves():
    """The default of 0.5 would need 95.46 GiB of 79; a share that the user gave is refused instead."""
    budget = budgets_of(PAIR, "rollout.one_step_off=true", "agents.*.engine_tp=1")["qwen-8b-base"]
    assert budget.engine.memory_share == 0.24 and budget.fits(ROOM) and not budget.engine_is_too_small
    assert budget.offload_line == "the engine, always awake, has 0.24 of the device"
    (line,) = complaints("rollout.one_step_off=true", f"{LARGE}.vllm.gpu_memory_utilization=0.5")
    assert "needs 95.46 GiB" in line


@pytest.mark.nightly
def test_agents_that_take_turns_leave_the_device_to_each_other(capsys, monkeypatch):
    """Against the same agent with a device of its own; of another agent its context stays, and its engine's graphs."""
    over = f"{LARGE}.recompute=mlp"
    alone, shared = (budgets_of(PAIR, over, *place)["qwen-8b-base"] for place in ((), (SHARED,)))
    part, left = alone.parts, 4 * GIB
    to_learn = part["gradients"] + part["main weights"] + part["moments"]
    state = part["main weights"] + part["moments"]
    expected = {
        "generate": left - part["weights"] - state - part["gather buffer"],
        "score": left - to_learn,
        "learn, first update": left + part["moments"],
        "learn": left,
        "optimizer step": left,
        "publish": left - to_learn - part["gather buffer"],
        "checkpoint": left - part["weights"] - state - part["gather buffer"] - part["engine awake"] + 3 * GIB // 2,
    }
    assert {phase: size - alone.phases[phase] for phase, size in shared.phases.items()} == expected
    assert shared.parts["on the host"] == part["weights"] + part["main weights"] + part["moments"]
    assert shared.phases == budgets_of(PAIR, over, SHARED, f"{LARGE}.offload=optimizer")["qwen-8b-base"].phases
    eager = budgets_of(PAIR, SHARED, f"{SMALL}.vllm.enforce_eager=true")
    assert [eager[name].parts["other agents"] for name in ("qwen-4b-base", "qwen-8b-base")] == [left, 5 * GIB // 2]
    # With a device of its own it is 72 GiB where 0.3 of it is the engine's; nobody else is there then.
    monkeypatch.setattr(
        sys,
        "argv",
        ["hacpo-mega", "check", "--resolved", str(PAIR), SHARED, f"{LARGE}.vllm.gpu_memory_utilization=0.8"],
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out = capsys.readouterr().out
    assert not ended.value.code
    assert "; agents take turns on 4 devices" in out
    assert re.findall(r"^other agents +(\S+)$", out, re.MULTILINE) == ["4.00", "4.00"]


def test_a_diagnosis_holds_one_more_copy_of_the_gradient():
    budget = budgets_of(PAIR, "training.diagnose_every=2")["qwen-4b-base"]
    assert budget.phases["diagnose"] - budget.phases["learn"] == budget.parts["own gradient"]
    assert budget.parts["own gradient"] == budget.parts["main weights"]
    for alone in ((), ("training.diagnose_every=2", "algorithm.method=gspo")):  # which shares no answers
        assert "diagnose" not in budgets_of(PAIR, *alone)["qwen-4b-base"].phases


@pytest.mark.nightly
def test_a_run_goes_on_under_another_choice():
    others = (f"{LARGE}.recompute=full", f"{LARGE}.offload=optimizer", GIVEN, SHARED)
    before, now = (plain(load_config(PAIR, list(overrides))) for overrides in ((), others))
    assert {(change.key, change.kind) for change in changes(before, now)} == {
        (f"{LARGE}.recompute", "free"),
        (f"{LARGE}.offload", "free"),
        ("device_memory_gib", "free"),
        ("placement", "free"),
    }


def test_the_type_of_weights_decides_their_bytes():
    config = load_config(PAIR)
    agent = config.agents[1]
    architecture = architecture_of(agent)

    def parts(dtype: str | None, *, on_cpu: bool) -> tuple[int, int]:
        typed = agent.model_copy(update={"dtype": dtype, "recompute": "full"})
        found = agent_budget(config, typed, architecture, on_cpu=on_cpu).parts
        return found["weights"], found["main weights"]

    for on_cpu in (True, False):
        weights, copies = parts("bfloat16", on_cpu=on_cpu)
        assert copies > 0 and parts("float32", on_cpu=on_cpu) == (2 * weights, 0)
        assert parts(None, on_cpu=on_cpu) == parts("float32" if on_cpu else "bfloat16", on_cpu=on_cpu)


def test_without_a_device_nothing_is_refused_and_nothing_recomputed(monkeypatch):
    """The configurations of the paper name one; without the line it is the installed packages that say."""
    config = load_config(PAIR, [SHARED]).model_copy(update={"device_memory_gib": None})
    for cpu_build, expected in ((True, None), (False, 79 * GIB)):
        monkeypatch.setattr(device_memory, "is_cpu_build", lambda found=cpu_build: found)
        budget = agent_budget(config, config.agents[1], architecture_of(config.agents[1]))
        assert (budget.capacity, budget.actor.device) == (expected, CPU if cpu_build else CUDA)
        assert budget.actor.recompute == ("none" if cpu_build else "mlp")
        table = memory_table({"a": budget})
        assert ("where nothing is refused" in table, "TransformerEngine" in table) == (cpu_build, not cpu_build)
        # On the CPU the engine does not sleep, and learning has it beside itself.
        assert (budget.parts["engine asleep"] == budget.parts["engine awake"]) == cpu_build


@pytest.mark.parametrize(
    "override, says",
    [
        ("device_memory_gib=0", "device_memory_gib: input should be greater than 0, found 0"),
        ("device_memory_gib=-8.5", "device_memory_gib: input should be greater than 0, found -8.5"),
        ("device_memory_gib='80GB'", "device_memory_gib: needs a number, found '80GB'"),
        ("device_memory_gib=nan", "device_memory_gib: "),
        (
            f"{LARGE}.recompute='selective'",
            f"{LARGE}.recompute: must be 'auto', 'none', 'mlp' or 'full', found 'selective'",
        ),
        (
            f"{LARGE}.megatron={{recompute_granularity='full'}}",
            f"{LARGE}: megatron.recompute_granularity is decided by this project, from the model folder and the "
            "agent's recompute; remove it",
        ),
        (f"{LARGE}.megatron={{recompute_num_layers=2}}", "the agent's recompute; remove it"),
    ],
)
def test_bad_input_is_one_line(override, says, capsys, monkeypatch):
    (line,) = complaints(override)
    assert says in line
    monkeypatch.setattr(sys, "argv", ["hacpo-mega", "check", str(PAIR), override])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [f"{PAIR}: {line}"]
