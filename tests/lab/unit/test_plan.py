"""Properties of every plan: what it knows by name, never does and refuses, and how near it is to the truth."""

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
from plan_cases import CLUSTER, write_cluster, write_small_job
from repository import ROOT
from typer.testing import CliRunner

from hacpo_lab.planning.cluster_file import load_cluster
from hacpo_lab.planning.configuration import Lengths, Planned, load_planned, work_of
from hacpo_lab.planning.kinds import KINDS
from hacpo_lab.planning.plan import make_plan
from hacpo_lab.planning.published import PUBLISHED, planned_seconds, ratios, worst_ratio
from hacpo_lab.planning.refusals import refusals
from hacpo_lab.planning.search import find_layouts, lightest
from hacpo_mega.cli.app import app
from hacpo_mega.models.flops import forward_flops
from hacpo_mega.models.public import PUBLIC_NAMES, public_architecture
from hacpo_mega.models.sharding.segments import all_sources

SCALE, CLUSTERS = ROOT / "configs" / "scale", ROOT / "configs" / "clusters"
PAIR, LARGE = SCALE / "qwen-8b_llama-8b.toml", SCALE / "qwen-32b_llama-70b.toml"
EXPERTS, LARGE_EXPERTS = SCALE / "qwen-30b-a3b_qwen-8b.toml", SCALE / "qwen-235b-a22b_qwen-32b.toml"
SMALL, WIDE = CLUSTERS / "h100-2x8.toml", CLUSTERS / "h100-32x8.toml"
ADAPTED = SCALE / "qwen-32b-lora_qwen-4b.toml"
ON = {PAIR: SMALL, LARGE: WIDE, EXPERTS: SMALL, LARGE_EXPERTS: WIDE, ADAPTED: SMALL}
# Share of a step that an agent waits. State of 30 billion parameters needs 12 of 16 devices, work that of 3 in them;
# one of the larger pair answers longer, the other learns longer; a 4B on as many devices as a 32B waits for it.
WAITS = {PAIR: 0.1, LARGE: 0.1, EXPERTS: 0.64, LARGE_EXPERTS: 0.38, ADAPTED: 0.8}
# Parameters that the Hub shows for the weights of each; of image checkpoints those of transformers' text model, of
# packed ones and those with layers of multi-token prediction those of transformers' model.
PARAMETERS = {
    "google/gemma-3-4b-it": 3_880_263_168,
    "google/gemma-3-12b-it": 11_766_034_176,
    "google/gemma-3-27b-it": 27_009_346_304,
    # With a number for each of 60 and of 30 layers, which transformers has as buffers.
    "google/gemma-4-31B-it": 30_697_345_340,
    "google/gemma-4-26B-A4B-it": 25_233_141_790,
    "mistralai/Ministral-3-3B-Base-2512": 3_429_006_336,
    "mistralai/Ministral-3-8B-Base-2512": 8_489_553_920,
    "mistralai/Ministral-3-14B-Base-2512": 13_506_073_600,
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": 23_572_403_200,
    "Qwen/Qwen3.5-0.8B": 752_393_024,
    "Qwen/Qwen3.5-2B-Base": 1_881_825_088,
    "Qwen/Qwen3.5-4B": 4_205_751_296,
    "Qwen/Qwen3.5-9B": 8_953_803_264,
    "Qwen/Qwen3.5-27B": 26_895_998_464,
    "Qwen/Qwen3.5-35B-A3B": 34_660_610_688,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": 36_151_104_512,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "MiniMaxAI/MiniMax-M2": 228_689_764_864,
    "tencent/Hy3-preview": 295_033_543_488,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200,
    "moonshotai/Moonlight-16B-A3B": 15_960_110_208,
    "zai-org/GLM-4.7-Flash": 29_943_393_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B-Base": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
}


def of_kind(folder: Path, kind: str, nodes: int, **tables) -> Path:
    file = folder / "kind.toml"
    file.write_text(tomli_w.dumps({"kind": kind, "nodes": nodes, **tables}), encoding="utf-8")
    return file


def planned_on(config: Path, cluster: Path, *overrides: str):
    machines = load_cluster(cluster)
    planned = load_planned(config, overrides, machines)
    work = work_of(planned.config, Lengths())
    return planned, {agent.name: work for agent in planned.config.agents}, machines


def fits(planned: Planned, work: dict, machines) -> bool:
    plan = make_plan(planned, work, machines)
    return not refusals(planned, plan, work, find_layouts(planned, work, machines))


def command(*arguments: object) -> str:
    """The output of the command, for a problem too."""
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, ValueError | SystemExit), result.exception
    return f"{result.output}{result.exception or ''}"


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_by_name_have_as_many_parameters_as_their_weights(name):
    model = public_architecture(name)
    numbers = 0
    for source in all_sources(model):
        size = 1
        for extent in source.shape:
            size *= extent
        numbers += size
    assert numbers == PARAMETERS[name]


def test_every_size_is_counted_above_and_a_path_is_as_good_as_a_name():
    sizes = {(a.num_layers, a.hidden_size, a.ffn_size, a.expert_ffn) for a in map(public_architecture, PUBLIC_NAMES)}
    counted = map(public_architecture, PARAMETERS)
    assert {(a.num_layers, a.hidden_size, a.ffn_size, a.expert_ffn) for a in counted} == sizes
    assert public_architecture("models/Qwen3-8B-Base") == public_architecture("Qwen/Qwen3-8B-Base")
    assert public_architecture("Qwen3-8B") != public_architecture("Qwen3-8B-Base")  # other positions


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_says_everything_but_the_nodes(tmp_path, kind):
    cluster = load_cluster(of_kind(tmp_path, kind, 3, rates={"learn": 0.25}))
    assert cluster.num_devices == 3 * cluster.devices_per_node
    assert (cluster.rates.learn, cluster.rates.score) == (0.25, KINDS[kind]["rates"]["score"])


def test_all_clusters_of_the_repository_are_used_or_named():
    assert {file.name for file in CLUSTERS.glob("*.toml")} == {"cpu.toml", "h100-2x8.toml", "h100-32x8.toml"}
    assert set(SCALE.glob("*.toml")) == set(ON)


@pytest.mark.parametrize("config", ON, ids=lambda file: file.stem)
@pytest.mark.nightly
def test_a_large_plan_waits_little_and_loads_no_torch(config, tmp_path):
    code = (
        "import sys\nfrom hacpo_mega.cli.app import app\napp(sys.argv[1:], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    out = tmp_path / "plan.json"
    arguments = ["plan", str(config), "--cluster", str(ON[config]), "--json", str(out)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "False"
    table = json.loads(out.read_text())
    assert all(agent["idle_share"] < WAITS[config] for agent in table["agents"].values())
    assert all(agent["memory"]["peak"] < 79 * 2**30 for agent in table["agents"].values())
    if config is PAIR:
        assert command(*arguments[1:]).strip() in done.stdout  # the same again, in another process


def test_more_devices_are_never_slower(tmp_path):
    walls = []
    for nodes in (1, 2, 3, 4):
        planned, work, machines = planned_on(PAIR, of_kind(tmp_path, "h100", nodes))
        ways = find_layouts(planned, work, machines)
        walls.append(ways.best.wall_s)
        seconds = [way.wall_s for way in ways.frontier]
        assert seconds == sorted(seconds, reverse=True)
    assert walls == sorted(walls, reverse=True) and walls[0] > walls[-1]


@pytest.mark.nightly
def test_more_memory_is_never_refused(tmp_path):
    sizes = (20.0, 40.0, 50.0, 60.0, 79.0, 120.0, 180.0)
    found = [fits(*planned_on(PAIR, of_kind(tmp_path, "h100", 2, device={"memory_gib": gib}))) for gib in sizes]
    assert found == sorted(found) and not found[0] and found[-1]


def test_a_faster_device_is_never_slower(tmp_path):
    walls = []
    for kind in ("a100-80", "h100", "h200", "b200"):
        planned, work, machines = planned_on(PAIR, of_kind(tmp_path, kind, 2))
        walls.append(make_plan(planned, work, machines).wall_s)
    assert walls == sorted(walls, reverse=True)


def test_the_best_way_is_the_plan_of_its_overrides(tmp_path):
    """The search judged agent by agent; a plan of all of them says the same, where they really lie."""
    planned, work, machines = planned_on(PAIR, ON[PAIR])
    best = find_layouts(planned, work, machines).best
    again = planned_on(PAIR, ON[PAIR], *best.overrides())
    assert make_plan(*again).wall_s == pytest.approx(best.wall_s)


def test_the_benchmark_of_the_quickstart_is_met():
    """Seconds a step at 0113f74, docs/measurements/throughput.md; the constants of `cpu` are of an older hacpo step."""
    alone = ("training.prompts_per_update=32",)
    cases = {"hacpo": ((), 2.83), "gspo_x2": (alone, 3.50), "gspo": (alone, 2.10)}
    for method, (overrides, measured_s) in cases.items():
        asked = (f"algorithm.method={method}", *overrides)
        planned, _, machines = planned_on(ROOT / "configs/quickstart.toml", CLUSTERS / "cpu.toml", *asked)
        work = work_of(planned.config, Lengths(6, 15))
        plan = make_plan(planned, dict.fromkeys(planned.models, work), machines)
        assert plan.wall_s == pytest.approx(measured_s, rel=0.15), method


REFUSED = (
    ({"device": {"memory_gib": "much"}}, "device.memory_gib: needs a number, found 'much'"),
    ({"links": {"inside_gb_per_s": 0.0}}, "links.inside_gb_per_s: input should be greater than or equal to 0.001"),
    ({"nodes": 0}, "nodes: input should be greater than or equal to 1, found 0. Nearest: 1"),
    ({"kind": "h10"}, "found 'h10'; did you mean 'h100'?"),
    ({"node": 3}, "node: unknown key; did you mean 'nodes'?"),
    ({"device": {"memry_gib": 3}}, "device.memry_gib: unknown key; did you mean 'memory_gib'?"),
    ({"rates": {"learn": 1.5}}, "rates.learn: input should be less than or equal to 1, found 1.5. Nearest: 1"),
)


@pytest.mark.parametrize(("changes", "line"), REFUSED, ids=[line[:30] for _, line in REFUSED])
def test_a_bad_cluster_is_refused(tmp_path, changes, line):
    found = command(PAIR, "--cluster", write_cluster(tmp_path, **changes))
    assert line in found and "cluster.toml" in found and len(found.splitlines()) == 1


@pytest.mark.parametrize("missing", ["device", "links", "host"])
def test_a_cluster_without_a_table_or_a_key_is_refused(tmp_path, missing):
    table = {key: value for key, value in CLUSTER.items() if key not in (missing, "rates")}
    found = command(PAIR, "--cluster", write_cluster(tmp_path, table))
    assert f"{missing}: required, not given" in found and "Nearest: kind = 'h100'" in found
    assert len(found.splitlines()) == 1  # rates have defaults
    key, *others = CLUSTER[missing]
    table = {**CLUSTER, missing: {name: CLUSTER[missing][name] for name in others}}
    found = command(PAIR, "--cluster", write_cluster(tmp_path, table))
    assert f"{missing}.{key}: required, not given" in found and f"whose {missing}.{key} is " in found


def test_a_cluster_that_is_no_file_or_no_toml_is_refused(tmp_path):
    assert "cannot be read" in command(PAIR, "--cluster", tmp_path / "nothing.toml")
    (tmp_path / "bad.toml").write_text("nodes =")
    assert "not valid TOML" in command(PAIR, "--cluster", tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["agents.qwen-8b.model=Qwen/Qwen3-9B"],
            ["Qwen/Qwen3-9B is no folder", "Nearest: Qwen/Qwen3.5-9B, Qwen/Qwen3-8B"],
        ),
        (["reward.kind=mth"], ["reward.kind: 'mth' is unknown; known: math, "]),
        (["reward={kind='number', options={foo=1}}"], ["reward.options: 'number' has no option foo"]),
        (["conversation.environment=calculater"], ["environment 'calculater' is unknown; known: calculator"]),
        (["agents.qwen-8b.tp=3"], ["tp (3) must divide the model's 32 attention heads. Nearest: tp = 2"]),
        (["placement=shared"], ["agents that take turns on devices are not planned for. Nearest: placement=split"]),
        (
            ["placement=apart"],
            ["their own are not planned for. `check` says what both kinds of device hold; the plan of"],
        ),
        (["rollout.one_step_off=true", "agents.*.engine_tp=1"], ["rollout.one_step_off: steps that overlap are not"]),
        (["lanes=3"], ["must be a multiple of lanes x cells_per_lane", "Nearest: 63 or 66"]),
        (["agents.qwen-8b.pp=5"], ["pp (5) must divide the model's 36 layers", "Nearest: pp = 4"]),
        (["--answer-tokens", "5000"], ["--answer-tokens (5000) must be 1 to", "Nearest: 4096"]),
        (["--prompt-tokens", "0"], ["--prompt-tokens (0) must be 1 to", "Nearest: 1"]),
        (["rollout.max_answer_tokens=40000"], ["must hold one prompt and answer"]),
        (["agents.qwen-8b.tp=1", "agents.qwen-8b.recompute=none"], ["GiB of a device that has 79.00", "Here fits: "]),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(arguments, lines):
    found = command(PAIR, *arguments, "--cluster", ON[PAIR])
    assert all(line in found for line in lines), found


def test_too_few_devices_are_refused_with_what_fits(tmp_path):
    found = command(PAIR, "--cluster", of_kind(tmp_path, "h100", 1))
    assert "16 processes (qwen-8b: 4 lanes x 1 cells x tp 2 x pp 1 = 8;" in found
    overrides = re.search(r"Here fits: (.*) \(8 devices, ", found)[1].split()
    assert fits(*planned_on(PAIR, of_kind(tmp_path, "h100", 1), *overrides))


def test_a_pair_of_two_makers_is_planned_on_one_node(tmp_path):
    """The text of an image checkpoint by its name: nothing of the vision tower is on a device."""
    models = "agents.qwen-8b.model=Qwen/Qwen3-8B", "agents.llama-8b.model=mistralai/Ministral-3-8B-Instruct-2512-BF16"
    planned, work, machines = planned_on(PAIR, of_kind(tmp_path, "h100", 1), *models, "lanes=2")
    assert fits(planned, work, machines)
    assert planned.models["llama-8b"] == public_architecture("mistralai/Ministral-3-8B-Base-2512")


def test_experts_of_another_family_are_planned_on_as_many_devices(tmp_path):
    """A node and a half for the state of 21 billion parameters; experts are cut by ranks of an engine."""
    planned, work, machines = planned_on(EXPERTS, ON[EXPERTS], "agents.qwen-30b-a3b.model=openai/gpt-oss-20b")
    assert planned.models["qwen-30b-a3b"].num_experts == 32 and fits(planned, work, machines)


@pytest.mark.nightly
def test_two_models_with_experts_need_large_devices_or_more_nodes(tmp_path):
    """A terabyte of state on 16 devices: those of 141 GB hold it beside the engines, those of 80 GB do not."""
    first = "model=Qwen/Qwen3.5-35B-A3B", "pp=4"
    second = "model=openai/gpt-oss-20b", "tp=4", "ep=4", "pp=2", "cp=1", "engine_tp=4"
    layout = [f"agents.qwen-30b-a3b.{key}" for key in first] + [f"agents.qwen-8b.{key}" for key in second]
    found = command(EXPERTS, *layout, "--cluster", ON[EXPERTS])
    assert "agents.qwen-30b-a3b: the phase 'publish' needs" in found and "but with nodes = 4: lanes=2" in found
    larger = *layout, "device_memory_gib=139"
    assert fits(*planned_on(EXPERTS, of_kind(tmp_path, "h200", 2), *larger))


@pytest.mark.nightly
def test_a_pair_that_needs_more_nodes_is_told_how_many(tmp_path):
    found = command(LARGE, "--cluster", of_kind(tmp_path, "h100", 1))
    nodes, overrides = re.search(r"No layout fits here, but with nodes = (\d+): (.*)", found).groups()
    assert fits(*planned_on(LARGE, of_kind(tmp_path, "h100", int(nodes)), *overrides.split()))


@pytest.mark.nightly
def test_a_model_that_fits_nowhere_is_told_what_memory_it_needs(tmp_path):
    found = command(PAIR, "--cluster", of_kind(tmp_path, "h100", 2, device={"memory_gib": 9.0}))
    needed = int(re.search(r"Nearest: device.memory_gib = (\d+) with nodes = 32$", found)[1])
    assert "No number of devices is enough" in found
    for gib, holds in ((needed - 1, False), (needed, True)):
        planned, work, machines = planned_on(PAIR, of_kind(tmp_path, "h100", 32, device={"memory_gib": float(gib)}))
        assert (find_layouts(planned, work, machines).best is not None) is holds


def test_a_smaller_engine_is_proposed_before_more_nodes(tmp_path):
    """Engines that are given nearly all of a device."""
    longer = ("agents.*.vllm.gpu_memory_utilization=0.9", "rollout.max_answer_tokens=8192")
    found = command(EXPERTS, *longer, "--cluster", of_kind(tmp_path, "h100", 2))
    overrides = re.search(r"Here fits: (.*) \(16 devices, ", found)[1].split()
    assert any(re.fullmatch(r"agents\.qwen-.*\.vllm\.gpu_memory_utilization=0\.\d+", key) for key in overrides)
    said = command(EXPERTS, *longer, *overrides, "--cluster", of_kind(tmp_path, "h100", 2))
    assert said.startswith("cluster: 2 nodes x 8 devices (h100)"), said
    assert "Nearest" not in found  # of an agent alone, which knows nothing of the devices


@pytest.mark.nightly
def test_an_engine_that_takes_all_is_given_less(tmp_path):
    found = command(PAIR, "agents.*.vllm.gpu_memory_utilization=0.999", "--cluster", ON[PAIR])
    overrides = re.search(r"Here fits: (.*) \(\d+ devices, ", found)[1].split()
    assert sum("gpu_memory_utilization=0." in key for key in overrides) == 2
    said = command(PAIR, "agents.*.vllm.gpu_memory_utilization=0.999", *overrides, "--cluster", ON[PAIR])
    assert max(map(len, said.splitlines())) <= 80 and said.startswith("cluster: ")


def test_one_agent_whose_answers_nobody_scores_is_planned(tmp_path):
    """Its phase `score` takes nothing at all."""
    (tmp_path / "alone").mkdir()
    job = write_small_job(tmp_path / "alone")
    table = tomllib.loads(job.read_text())
    job.write_text(tomli_w.dumps(table | {"agents": table["agents"][:1], "algorithm": {"method": "grpo"}}))
    found = command(job, "--cluster", write_cluster(tmp_path, nodes=2))
    assert re.search(r"^a +\d+\.\d\d +\d+\.\d\d +0\.00 ", found, re.MULTILINE) and "layouts that let" in found, found


def test_a_host_that_cannot_take_a_checkpoint_is_refused(tmp_path):
    small = of_kind(tmp_path, "h100", 2, host={"memory_gib": 80.0})
    assert "checkpoint.asynchronous copies 99.2 GiB to the host of a node, which has 80" in command(
        PAIR, "--cluster", small
    )
    assert "copies" not in command(PAIR, "checkpoint.asynchronous=false", "--cluster", small)


def test_a_file_that_cannot_be_written_or_is_read_is_refused(tmp_path):
    job, cluster = write_small_job(tmp_path), write_cluster(tmp_path)
    before = job.read_bytes(), cluster.read_bytes()
    assert f"{tmp_path}: is a folder" in command(job, "--cluster", cluster, "--json", tmp_path)
    for read in (job, cluster):
        assert f"{read}: is what is read" in command(job, "--cluster", cluster, "--json", read)
    assert (job.read_bytes(), cluster.read_bytes()) == before


def test_bad_input_ends_with_2_and_one_line():
    arguments = ["plan", str(PAIR), "--cluster", str(ROOT / "nothing.toml")]
    done = subprocess.run([sys.executable, "-m", "hacpo_mega.cli", *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


def test_the_lightest_layout_is_held_by_its_memory_and_by_no_less(tmp_path):
    planned, _, machines = planned_on(PAIR, ON[PAIR])
    agent = planned.config.agents[0]
    least = lightest(planned, agent, machines)
    smaller = replace(planned, config=planned.config.model_copy(update={"device_memory_gib": least.memory_gib - 1.0}))
    assert least.agent.recompute == "full" and least.memory_gib < 79
    assert lightest(smaller, agent, machines) == least  # what the cluster's devices have is not asked


# Tokens a second and GPU that the sources print beside the seconds.
PUBLISHED_RATES = {"NeMo-RL 0.5, Llama-3.1-8B": 1581, "NeMo-RL 0.6, Qwen3-30B-A3B": 1102}


def test_a_plan_says_how_far_it_is_from_published_steps():
    for step in PUBLISHED:
        assert ratios()[step.name] == pytest.approx(step.seconds / planned_seconds(step))
        if step.name in PUBLISHED_RATES:
            tokens = step.answers * (step.prompt_tokens + step.answer_tokens)
            rate = tokens / step.seconds / (step.nodes * KINDS[step.kind]["devices_per_node"])
            assert rate == pytest.approx(PUBLISHED_RATES[step.name], rel=0.01)
        else:  # prime-rl's trainer, whose baselines recompute activations: a fourth forward, a third of frozen matrices
            flops = forward_flops(public_architecture(step.model), step.answers, step.answer_tokens)
            least = 3 if "lora" in step.layout else 4
            assert least < planned_seconds(step) / (flops / 8 / 0.41 / 990e12) < 4.1, step.name
    assert 1.0 < worst_ratio() == max(ratios()[name] for name in PUBLISHED_RATES)
    result = CliRunner().invoke(app, ["plan", str(PAIR), "--cluster", str(SMALL)])
    found = re.search(r"seconds of a step: (\S+) to (\d+): no whole GPU step is timed", result.output)
    assert float(found[2]) == pytest.approx(float(found[1]) * worst_ratio(), abs=1.0)


def test_a_plan_of_measured_rates_has_no_range(tmp_path):
    file = write_small_job(tmp_path)
    result = CliRunner().invoke(app, ["plan", str(file), "--cluster", str(of_kind(tmp_path, "cpu", 1))])
    assert re.search(r"seconds of a step: [\d.]+\n", result.output)
    assert "is timed" not in result.output
