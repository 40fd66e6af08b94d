"""Configuration: presets, overrides, and one clear line for everything that can be wrong in it."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import tomli_w
from pydantic import ValidationError
from repository import ROOT

from hacpo_mega.cli.app import check
from hacpo_mega.config import AlgorithmConfig, config_of_run, config_of_table, load_config
from hacpo_mega.config.changes import NONE, ROUNDING, covers, effect_of
from hacpo_mega.config.checks.notes import (
    default_success_note,
    missing_kernels,
    narrow_clip_note,
    unread_settings,
    weak_settings,
)
from hacpo_mega.config.describe import flat
from hacpo_mega.config.load import load_unchecked
from hacpo_mega.config.tables.agents import WarmStartConfig
from hacpo_mega.config.tables.algorithm import PRESETS
from hacpo_mega.config.tables.methods import METHODS
from hacpo_mega.logbook.run.run_folder import resolved_toml

QUICKSTART = ROOT / "configs" / "quickstart.toml"


def complaint(*overrides: str, config: Path = QUICKSTART) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        load_config(config, overrides)
    return str(error.value)


def test_presets_fill_what_is_not_given():
    paper, authors = AlgorithmConfig(), AlgorithmConfig(preset="authors", kl_coef=0.5)
    assert (paper.cross_baseline, paper.aggregation, paper.kl_coef, paper.omega_clip) == ("source", "sum", 0.0, None)
    assert (authors.cross_baseline, authors.aggregation, authors.kl_coef) == ("learner", "mean", 0.5)
    assert authors.omega_clip == (0.1, 10.0)


def test_presets_list_what_differs_from_the_defaults_and_nothing_else():
    assert set(PRESETS) == set(get_args(AlgorithmConfig.model_fields["preset"].annotation))
    for preset, choices in PRESETS.items():
        defaults = {name: AlgorithmConfig.model_fields[name].default for name in choices}
        assert not [name for name, value in choices.items() if defaults[name] == value]
        filled = AlgorithmConfig(preset=preset).model_dump()
        assert filled == AlgorithmConfig().model_dump() | choices | {"preset": preset}


def test_a_configuration_is_frozen():
    config = load_config(QUICKSTART)
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3


def test_overrides_reach_tables_and_agents_by_name():
    config = load_config(
        QUICKSTART, ["seed=11", "agents.qwen.optimizer.lr=1e-5", "agents.*.tp=1", "run_dir=runs/other", "lanes=2"]
    )
    assert (config.seed, config.lanes, str(config.run_dir)) == (11, 2, "runs/other")
    assert [agent.optimizer.lr for agent in config.agents] == [1e-5, 4e-4]


def test_a_table_that_all_agents_are_given_is_each_ones_own():
    """A later override of the table of one agent is not in the others'."""
    vllm = ["agents.*.vllm={}", "agents.qwen.vllm.max_num_seqs=3", "agents.llama.vllm.max_num_seqs=5"]
    assert [agent.vllm["max_num_seqs"] for agent in load_config(QUICKSTART, vllm).agents] == [3, 5]


def test_a_whole_number_is_a_number_but_nothing_else_changes_its_kind():
    config = load_config(
        QUICKSTART, ["algorithm.alpha=3", "rollout.temperature=1", "agents.qwen.optimizer.clip_grad=2"]
    )
    found = (config.algorithm.alpha, config.rollout.temperature, config.agents[0].optimizer.clip_grad)
    assert found == (3.0, 1.0, 2.0)
    assert {type(value) for value in found} == {float}


@pytest.mark.parametrize(
    "override, message",
    [
        ("rollout.temprature=1.0", "rollout.temprature: unknown key; did you mean 'temperature'?"),
        ("agents.qwen.optimizer.lrr=1", "agents.qwen.optimizer.lrr: unknown key; did you mean 'lr'?"),
        ("num_steps='ten'", "num_steps: needs a whole number, found 'ten'"),
        ("agents.qwen.tp=0", "agents.qwen.tp: input should be greater than or equal to 1, found 0"),
        ("agents.mistral.tp=1", "no entry is named 'mistral'; there are: qwen, llama"),
        ("seed", "expected section.key=value"),
        ("agents.*.system_prompt=null", "there is no null in TOML; take the key out of the file, or quote a text"),
        ("run_dir=None", """or quote a text: '"None"'"""),
        ("seed.x=1", "leads into a int, not a table"),
        (
            "training.prompts_per_step=100",
            "(100) must be a multiple of training.prompts_per_update (16). Nearest: 96 or",
        ),
        ("lanes=3", "(16) must be a multiple of lanes x cells_per_lane of agent qwen (3 x 1 = 3). Nearest: 15 or 18"),
        ("agents.llama.tp=2", "tp (2) must divide the model's 3 attention heads. Nearest: tp = 1"),
        ("agents.qwen.engine_tp=3", "engine_tp (3) must divide tp x pp (1 x 1 = 1). Nearest: engine_tp = 1"),
        ("training.max_tokens_per_microbatch=31", "must hold one prompt and answer"),
        ("rollout.max_answer_tokens=300", "is beyond the 256 positions"),
        ("agents.qwen.vllm.seed=3", "vllm.seed is decided by this project"),
        ("agents.qwen.megatron.bf16=true", "megatron.bf16 is decided by this project"),
        ("data.files=['none.jsonl']", "exactly one of them"),
        ("algorithm.omega_clip=[2.0, 3.0]", "needs 0 < low <= 1 <= high"),
        (
            "algorithm={advantage_eps = 0.0, uniform_group_is_zero = false}",
            "Nearest: advantage_eps = 1e-6, or uniform_group_is_zero = true",
        ),
        (
            "algorithm.band='calibrated'",
            "algorithm.band: removed, since it gained nothing (CHANGELOG.md). Leave it out",
        ),
        (
            "training.pack_by='tokens'",
            "training.pack_by: removed, since it gained nothing (CHANGELOG.md). Leave it out",
        ),
        ("rollout.biased_cut_after=1.0", "rollout.biased_cut_after: removed"),
        ("agents.llama.name='qwen'", "the name 'qwen' occurs 2 times"),
        ("agents.llama.model=meta-llama/Llama-3.2-1B", "agents.llama.init would make another under"),
        (
            "reward.success=0",
            "reward.success: needs the name of a part, or a number above 0, at most 1, found 0. Nearest:",
        ),
        ("reward.success=1.5", "found 1.5. Nearest: 1.0"),
        ("reward.success=true", "reward.success: needs the name of a part, or a number above 0, at most 1, found True"),
        ("reward.success=nan", "found nan"),
        (
            "reward.success=right",
            "'right' is no part of the reward; there is none, so give a number above 0, at most 1",
        ),
        (
            "reward={success='rihgt',parts={short={kind='exact'},right={kind='arithmetic'}}}",
            "reward.success: 'rihgt' is no part of the reward; there are: short, right. Nearest: 'right'",
        ),
        ("algorithm.success_reward=1.0", "algorithm.success_reward: unknown key; did you mean 'reward.success'?"),
        ("agents.qwen.init.warm_start.skills.add.share=0.9", "add up to 1.43; they must add up to 1"),
    ],
)
def test_a_mistake_is_one_clear_line(override, message):
    assert message in complaint(override)


def test_all_problems_come_at_once():
    found = complaint("lanes=3", "training.prompts_per_step=100", "agents.qwen.tp=3").splitlines()
    assert len(found) >= 3
    assert all(line.startswith(str(QUICKSTART)) for line in found)


def test_a_missing_and_a_broken_file(tmp_path):
    assert "cannot be read" in complaint(config=tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("seed = = 3")
    assert "not valid TOML" in complaint(config=broken)


def test_model_folders_are_judged_by_their_config_json(tmp_path):
    text = QUICKSTART.read_text().replace("runs/models/qwen", str(tmp_path / "qwen"))
    config = tmp_path / "run.toml"
    config.write_text(
        text.replace('[agents.init]\nfamily = "qwen3"', '[agents.megatron]\n[agents.init]\nfamily = "qwen3"')
    )
    folder = tmp_path / "qwen"
    folder.mkdir()
    (folder / "config.json").write_text("{")
    assert "not valid JSON" in complaint(config=config)
    (folder / "config.json").write_text(json.dumps({"architectures": ["GPTNeoXForCausalLM"]}))
    unknown = r"GPTNeoXForCausalLM is not supported; nearest: \w+ForCausalLM; supported: LlamaForCausalLM"
    assert re.search(unknown, complaint(config=config))
    (folder / "config.json").write_text(
        json.dumps(
            {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 8, "num_attention_heads": 2}
        )
    )
    assert "the field 'num_hidden_layers' is missing" in complaint(config=config)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 10**12}
    table = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"} | sizes
    (folder / "config.json").write_text(json.dumps(table))
    assert "config.json: num_hidden_layers is more than 10,000, which no model has" in complaint(config=config)


def test_a_missing_model_folder_is_named(tmp_path):
    text = QUICKSTART.read_text()
    start, end = text.index("[agents.init]"), text.index("# Good at sub")
    config = tmp_path / "run.toml"
    config.write_text(text[:start].replace("runs/models/qwen", "nowhere/qwen") + text[end:])
    assert "agents.qwen: model folder nowhere/qwen has no config.json" in complaint(config=config)


PARTS = "reward={parts={right={kind='arithmetic',weight=0.8},short={kind='x.py:brevity'}}}"


@pytest.mark.parametrize(
    ("overrides", "readers", "advice"),
    [
        ((PARTS,), "pass@k and maj@k of eval", '"right", for the full'),
        ((PARTS, "algorithm={preset='authors'}"), "pass@k", '"right", for the full'),
        ((PARTS, "algorithm={method='sgt'}"), "sgt, pass@k", '"right", for the full'),
        ((PARTS, "algorithm={capability_metric='positive_rate'}"), "capability (positive_rate), ", '"right"'),
        (("reward={kind='x.py:brevity'}",), "pass@k", "the least reward of one, such as reward.success = 0.9"),
        (("reward={kind='program',options={graded=true}}",), "pass@k", "the least reward of one"),
        (("reward={kind='model'}",), "pass@k", "the least reward of one"),
        (("reward={kind='math',range=[-1.0,1.0]}",), "pass@k", "the least reward of one"),
        (("reward={kind='program'}",), None, None),
        (("reward={kind='number'}", "algorithm={method='sgt'}"), None, None),
        (("reward={parts={right={kind='json'}}}",), None, None),
        (("reward={kind='x.py:brevity',success=0.9}",), None, None),
    ],
)
def test_a_run_says_what_a_success_is_where_nothing_else_does(overrides, readers, advice):
    """And what it says to set is no mistake."""
    config = load_unchecked(QUICKSTART, overrides)
    lines = list(default_success_note(config))
    assert len(lines) == (readers is not None)
    for line in lines:
        assert line.startswith("reward.success is not given: nothing says which answers are a success, so those with")
        assert f"count, for {readers}" in line and advice in line
        for said in re.findall(r'reward\.success = ("\w+"|[\d.]+)', line):
            assert not list(default_success_note(load_unchecked(QUICKSTART, (*overrides, f"reward.success={said}"))))


def test_check_says_it_before_anything_is_trained(capsys):
    check(QUICKSTART, ["reward={kind='program',options={graded=true}}", "algorithm={method='sgt'}"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("reward.success")]
    assert "is not given: nothing says which answers are a success" in line and "count, for sgt, pass@k" in line
    check(QUICKSTART, ["algorithm={method='sgt'}"])
    assert "reward.success" not in capsys.readouterr().out


def test_reading_a_configuration_loads_no_torch():
    code = "import sys, hacpo_mega.config as c; c.load_config(sys.argv[1]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(QUICKSTART)], check=True)


def test_a_run_that_is_over_is_read_without_its_files_and_refused_in_lines(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.toml: give the run_dir of a run"):
        config_of_run(tmp_path)
    text = QUICKSTART.read_text().replace("runs/models", "gone/models")
    (tmp_path / "config.toml").write_text(text)
    assert [agent.name for agent in config_of_run(tmp_path).agents] == ["qwen", "llama"]
    for before, now in (("0.25", 0.25), ("1.0", None)):  # where older runs say what a success is
        old = text.replace("[algorithm]", f"[algorithm]\nsuccess_reward = {before}")
        (tmp_path / "config.toml").write_text(old)
        assert config_of_run(tmp_path).reward.success == now
    for band in ("fixed", "calibrated"):
        old = text.replace("[algorithm]", f'[algorithm]\nband = "{band}"\nband_share = 0.8\nband_smoothing = 0.8')
        (tmp_path / "config.toml").write_text(old)
        assert config_of_run(tmp_path).algorithm.delta == 0.5
    (tmp_path / "config.toml").write_text(text.replace("num_steps = 40", "num_steps = 40.0").replace("seed", "sed"))
    with pytest.raises(ValueError, match=r".") as error:
        config_of_run(tmp_path)
    assert [line.rpartition("a run: ")[2] for line in str(error.value).splitlines()] == [
        "num_steps: needs a whole number, found 40.0",
        "sed: unknown key; did you mean 'seed'?",
    ]


@pytest.mark.parametrize("place", ["config.toml", "slurm/config.1.toml"])
def test_a_file_that_an_older_version_resolved_is_read(tmp_path, place):
    """A job of Slurm that is queued again, or `train RUN/config.toml`; a user's own file has no such keys."""
    own, stored = tmp_path / "own.toml", tmp_path / "run" / place
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "starts.jsonl").touch()
    stored.parent.mkdir(exist_ok=True)
    old = QUICKSTART.read_text().replace('preset = "paper"', 'preset = "authors"').replace("delta = 0.5", "")
    for table, keys in (
        ("algorithm", 'band = "fixed"\nband_share = 0.8\nsuccess_reward = 1.0\ncapability_metric = "positive_rate"'),
        ("training", 'pack_by = "flops"'),
        ("rollout", "biased_cut_after = 1.0"),
    ):
        old = old.replace(f"[{table}]", f"[{table}]\n{keys}")
    old = old.replace('method = "hacpo"', 'method = "naive"')
    for file in (own, stored):
        file.write_text(old)
    assert (
        load_unchecked(stored).algorithm.method
        == config_of_table(tomllib.loads(old), stored).algorithm.method
        == "naive"
    )
    with pytest.raises(ValueError, match=r"training\.pack_by: removed"):
        load_unchecked(own)
    stored.write_text(old.replace('band = "fixed"', 'band = "calibrated"'))
    with pytest.raises(ValueError, match=r"algorithm\.band: removed"):
        load_unchecked(stored)
    stored.write_text(old.replace("biased_cut_after = 1.0", "biased_cut_after = 0.9"))
    with pytest.raises(ValueError, match=r"rollout\.biased_cut_after: removed"):
        load_unchecked(stored)


def test_an_override_of_the_method_drops_options_of_the_files_method(tmp_path):
    """The quickstart's band is HACPO's; a rival by override starts from the same file and refuses what it is given."""
    text = QUICKSTART.read_text(encoding="utf-8")
    assert load_config(QUICKSTART).algorithm.delta == 0.5
    for method in METHODS:
        config = load_config(QUICKSTART, [f"algorithm.method={method}"])
        assert (config.algorithm.method, config.algorithm.delta) == (method, 0.5 if method == "hacpo" else 0.2)
    with pytest.raises(ValueError, match=r"algorithm: delta = 0\.4: method 'gspo' does not read it"):
        load_config(QUICKSTART, ["algorithm.method=gspo", "algorithm.delta=0.4"])
    assert load_config(QUICKSTART, ["algorithm.cross_clip=own"]).algorithm.delta == 0.2  # beside it nothing reads delta
    assert AlgorithmConfig(preset="authors", kl_on="all").kl_on == "all"  # read: their kl_coef is not 0
    of_another = tmp_path / "gspo.toml"
    of_another.write_text(text.replace('method = "hacpo"', 'method = "gspo"'), encoding="utf-8")
    with pytest.raises(ValueError, match=r"algorithm: delta = 0\.5: method 'gspo' does not read it"):
        load_config(of_another)


def test_a_partial_table_keeps_the_warm_starts_rate():
    """One key of the optimizer's table leaves the others at the warm start's defaults, as no table does."""
    skills = {"add": {"share": 1.0}}
    tables = {"skills": skills}, {"skills": skills, "optimizer": {"weight_decay": 0.1}}
    assert [WarmStartConfig(**table).optimizer.lr for table in tables] == [3e-3, 3e-3]


def test_own_advantages_keep_the_files_capability_options(tmp_path):
    """An override of the method drops what nothing reads any more: functions of one's own read the capability."""
    file, mine = tmp_path / "run.toml", "configs/methods/value.py:value"
    text = QUICKSTART.read_text(encoding="utf-8").replace("delta = 0.5", "delta = 0.5\ncapability_window = 3")
    file.write_text(text, encoding="utf-8")
    found = load_config(file, ["algorithm.method=naive", f"algorithm.advantages={ROOT / mine}"]).algorithm
    assert (found.capability_window, found.delta) == (3, 0.2)
    assert load_config(file, ["algorithm.method=naive"]).algorithm.capability_window == 5


@pytest.mark.parametrize("method", METHODS)
def test_alpha_is_refused_where_nothing_reads_it(method, tmp_path, monkeypatch):
    """In a file and by an override, for every method but HACPO, and for HACPO with the own clip or an own objective."""
    monkeypatch.chdir(ROOT)
    table = {"method": method, "alpha": 3.0}
    file = tmp_path / "run.toml"
    text = QUICKSTART.read_text(encoding="utf-8").replace("delta = 0.5\n", "")
    file.write_text(text.replace('method = "hacpo"', f'method = "{method}"\nalpha = 3.0'), encoding="utf-8")
    if method == "hacpo":
        assert load_config(file).algorithm.alpha == AlgorithmConfig(**table).alpha == 3.0
        objective = "configs/methods/cispo.py:cispo"
        for key, value in (("cross_clip", "own"), ("objective", objective)):
            with pytest.raises(ValueError, match=rf"alpha = 3.0: not read beside {key} = '{value}'. Leave one out"):
                load_config(QUICKSTART, [f"algorithm.{key}={value}", "algorithm.alpha=3.0"])
            with pytest.raises(ValueError, match=r"alpha = 3.0: not read beside"):
                AlgorithmConfig(**table, **{key: value})
            assert load_config(file, [f"algorithm.{key}={value}"]).algorithm.alpha == 1.0  # the file's is dropped
        assert AlgorithmConfig(cross_clip="own", alpha=0.0).alpha == 0.0  # no exponent, as the own clip has it
        return
    with pytest.raises(ValueError, match=rf"alpha = 3.0: method '{method}' does not read it"):
        load_config(file)
    with pytest.raises(ValueError, match=rf"alpha = 3.0: method '{method}' does not read it"):
        load_config(QUICKSTART, [f"algorithm.method={method}", "algorithm.alpha=3.0"])
    with pytest.raises(ValueError, match=rf"alpha = 3.0: method '{method}' does not read it"):
        AlgorithmConfig(**table)


@pytest.mark.parametrize(
    "beside, value, unread",
    [
        ("cross_clip", "none", {"delta": 0.4, "delta_step": 0.1}),
        (
            *("advantages", "configs/methods/value.py:value"),
            {"uniform_group_is_zero": False, "advantage_eps": 0.5, "omega_clip": [0.5, 2.0]},
        ),
    ],
)
def test_options_that_nothing_reads_beside_another_are_refused(beside, value, unread, tmp_path, monkeypatch):
    """Together in a file or by overrides; a run of before, which took them, is read without them."""
    monkeypatch.chdir(ROOT)
    for key, number in unread.items():
        found = tuple(number) if isinstance(number, list) else number
        says = rf"algorithm: {key} = .*: not read beside {beside} = '{value}'. Leave one out"
        with pytest.raises(ValueError, match=says):
            load_config(QUICKSTART, [f"algorithm.{beside}={value}", f"algorithm.{key}={json.dumps(number)}"])
        assert getattr(AlgorithmConfig(**{key: found}), key) == found
        assert getattr(load_config(QUICKSTART, [f"algorithm.{beside}={value}"]).algorithm, beside) == value
        table = tomllib.loads(resolved_toml(load_config(QUICKSTART, [f"algorithm.{beside}={value}"])))
        table["algorithm"][key] = number
        (tmp_path / "config.toml").write_text(tomli_w.dumps(table), encoding="utf-8")
        assert getattr(config_of_run(tmp_path).algorithm, key) == AlgorithmConfig.model_fields[key].default


@pytest.mark.parametrize("method", METHODS)
def test_a_resolved_configuration_of_every_method_is_read_back(method, tmp_path):
    config = load_config(QUICKSTART, [f"algorithm.method={method}"])
    resolved = tmp_path / "config.toml"
    resolved.write_text(resolved_toml(config), encoding="utf-8")
    assert load_config(resolved) == config


def test_twice_the_answers_and_updates_with_as_many_answers_in_each():
    gspo, twice = (load_config(QUICKSTART, [f"algorithm.method={name}"]) for name in ("gspo", "gspo_x2"))
    assert (twice.answers_per_prompt, twice.updates_per_step) == (
        2 * gspo.answers_per_prompt,
        2 * gspo.updates_per_step,
    )
    per_update = [config.answers_per_prompt * config.prompts_per_update for config in (gspo, twice)]
    assert per_update[0] == per_update[1] == 128


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_method_that_needs_peers_is_refused_for_one_agent(method, tmp_path):
    table = tomllib.loads(QUICKSTART.read_text(encoding="utf-8"))
    del table["agents"][1], table["algorithm"]["delta"]
    alone = tmp_path / "alone.toml"
    alone.write_text(tomli_w.dumps(table), encoding="utf-8")
    if METHODS[method].needs_peers:
        with pytest.raises(
            ValueError, match=f"algorithm.method: '{method}' learns from other agents, and there is one"
        ):
            load_config(alone, [f"algorithm.method={method}"])
    else:
        assert len(load_config(alone, [f"algorithm.method={method}"]).agents) == 1


def test_one_answer_is_refused_where_it_has_nothing_to_be_measured_against(tmp_path):
    """By the equations: the group of grpo, gspo, f_tis (author) and of an agent alone is its own G answers."""
    one = "rollout.rollouts_per_prompt=1"
    refused = r"rollout.rollouts_per_prompt \(1\): '{}' measures an answer .* every advantage is 0\. Nearest: 2$"
    for method in METHODS:
        asked = [f"algorithm.method={method}", one]
        if method in ("grpo", "gspo", "f_tis"):
            with pytest.raises(ValueError, match=refused.format(method)):
                load_config(QUICKSTART, asked)
            assert load_config(QUICKSTART, [*asked[:1], "rollout.rollouts_per_prompt=2"]).answers_compared == 2
        else:
            compared = {"gspo_x2": 2, "sgt": 1}.get(method, 2)  # gspo_x2 asks twice; hacpo and naive: both agents' one
            assert load_config(QUICKSTART, asked).answers_compared == compared
    assert load_config(QUICKSTART, ["algorithm.method=f_tis", "algorithm.answer_group=all", one]).answers_compared == 2
    table = tomllib.loads(QUICKSTART.read_text(encoding="utf-8"))
    del table["agents"][1]
    alone = tmp_path / "alone.toml"
    alone.write_text(tomli_w.dumps(table), encoding="utf-8")
    with pytest.raises(ValueError, match=refused.format("hacpo")):
        load_config(alone, [one])
    own = tmp_path / "mine.py"
    own.write_text("def advantages(rewards_PNG, capability_N, learner):\n    return rewards_PNG - 0.5\n")
    assert load_config(alone, [one, f"algorithm.advantages={own}:advantages"]).answers_compared == 1


def test_settings_that_teach_less_than_they_say_are_named():
    overrides = ["algorithm.delta=0.0", "agents.llama.optimizer.warmup_updates=320", "rollout.temperature=0.1"]
    assert list(weak_settings(load_config(QUICKSTART))) == []
    temperature, delta, warmup = weak_settings(load_config(QUICKSTART, overrides))
    assert temperature.startswith("rollout.temperature = 0.1: ") and delta.startswith("algorithm.delta = 0: ")
    # 40 steps of 4 updates: half of the way up to 4e-4
    assert warmup == (
        "agents.llama.optimizer.warmup_updates = 320: the run has 160 updates, so its learning rate ends at 0.0002 "
        "instead of 0.0004"
    )
    (alone,) = weak_settings(load_config(QUICKSTART, ["algorithm.method=sgt", "rollout.rollouts_per_prompt=1"]))
    assert alone.startswith("rollout.rollouts_per_prompt = 1: 'sgt' has no second answer")


@pytest.mark.parametrize(
    "overrides, named",
    {
        ("data={files=['rows.jsonl']}", "evaluation={every_steps=2}", "checkpoint.keep_best=true"): (
            "evaluation.every_steps checkpoint.keep_best"
        ),
        ("data={files=['rows.jsonl'], skills=['mul']}", "evaluation={}"): "data.skills",
        ("data.gold_field=gold", "logging.trace_steps=[1]", "logging.project=p"): (
            "data.gold_field logging.trace_steps logging.project"
        ),
        ("data.gold_field=gold", "evaluation.files=['held_out.jsonl']"): "",
        ("rollout.engine_correction=ratio", "rollout.engine_correction_cap=3.0"): "rollout.engine_correction_cap",
        ("rollout.engine_correction=token", "rollout.engine_correction_cap=3.0"): "",
        ("algorithm.method=gspo", "training.diagnose_every=1"): "training.diagnose_every",
        ("agents.llama.optimizer.min_lr_ratio=0.1",): "agents.llama.optimizer.min_lr_ratio",
        ("agents.llama.optimizer={min_lr_ratio=0.1, schedule='cosine'}",): "",
        ("checkpoint={every_steps=0, every_minutes=0.0, keep_every=4}",): "checkpoint.keep_every",
        ("checkpoint.keep_best=true", "evaluation.every_steps=0"): "checkpoint.keep_best",
        ("checkpoint={every_steps=9, every_minutes=0.0, keep_best=true}", "evaluation.every_steps=7"): (
            "checkpoint.keep_best"
        ),
        ("checkpoint={every_steps=9, keep_best=true}", "evaluation.every_steps=7"): "",
        ("reward={kind='exact', num_workers=4, while_sampling=true, timeout_s=9.0}",): (
            "reward.timeout_s reward.num_workers reward.while_sampling"
        ),
        ("reward={kind='math', num_workers=4, while_sampling=true}",): "",
        ("reward={parts={a={kind='exact'}, b={kind='own.py:grade'}}, num_workers=4}",): "",
    }.items(),
)
def test_a_setting_that_another_one_leaves_without_effect_is_named(overrides, named):
    lines = list(unread_settings(load_unchecked(QUICKSTART, list(overrides))))
    assert [line.partition(" has no effect: ")[0] for line in lines] == named.split(), lines


def test_what_an_environment_that_gives_rewards_does_not_read_is_named():
    given = ["reward={success='a', require_stop=true, parts={a={kind='math'}}}"]
    played = {
        name: list(unread_settings(load_unchecked(QUICKSTART, [*given, f"conversation.environment={name}"])))
        for name in ("calculator", "relay", "number_game")
    }
    assert played["calculator"] == played["relay"] == []
    stop, success = played["number_game"]
    assert stop.startswith("reward.require_stop has no effect on a conversation that number_game gives a reward")
    assert success.startswith("reward.success = 'a' has no effect on a conversation that number_game gives a reward")


def test_no_configuration_of_ours_has_a_setting_without_effect():
    files = [file for file in (ROOT / "configs").rglob("*.toml") if "agents" in tomllib.loads(file.read_text())]
    runs = [file for file in files if "regimes" not in tomllib.loads(file.read_text())]
    assert len(runs) > 9
    assert {str(file): lines for file in runs if (lines := list(unread_settings(load_unchecked(file))))} == {}


@pytest.mark.parametrize(
    "overrides, says",
    [
        (["rollout.one_step_off=true"], "about a quarter lose their gradient by it. Set both to 0.01"),
        (["agents.qwen.optimizer.lr=1e-6"], "updates at a learning rate of 1e-06 or less: look at self/clipped"),
        ([], None),  # updates at 4e-4 move ratios far more
        (["agents.qwen.dtype=float32", "agents.qwen.optimizer.lr=1e-6"], None),  # whose ratios no bf16 moves
        (["rollout.one_step_off=true", "algorithm.eps_low=0.01", "algorithm.eps_high=0.01"], None),
        (["rollout.one_step_off=true", "algorithm.method=grpo"], None),
    ],
)
def test_a_clip_within_the_rounding_of_bf16_is_named(overrides, says):
    lines = list(narrow_clip_note(load_unchecked(QUICKSTART, ["device_memory_gib=80", *overrides])))
    assert len(lines) == (says is not None) and all(line.endswith(says) for line in lines), lines
    assert not list(narrow_clip_note(load_unchecked(QUICKSTART, overrides))), "float32 on the CPU"


def test_every_key_has_one_effect_and_every_pattern_a_key():
    """The continuation of a run and the comparison of runs ask the same table."""
    asked = ["slurm.partition=gpu", "device_memory_gib=80.0", "agents.qwen.pp=2", "agents.qwen.engine_tp=1"]
    asked += ["placement=apart", "agents.*.rollout_gpus=1"]
    asked += ["agents.llama.pp=3", "agents.llama.init.num_layers=6"]
    asked += ["agents.llama.megatron.virtual_pipeline_model_parallel_size=2"]
    asked += [f"agents.qwen.megatron.num_layers_in_{end}_pipeline_stage={n}" for end, n in (("first", 1), ("last", 2))]
    asked += [f"agents.{name}.model=runs/models/not_made/{name}" for name in ("qwen", "llama")]  # others may be there
    keys = dict(flat(load_config(QUICKSTART, asked).model_dump(mode="json")))
    for pattern in (*NONE, *ROUNDING):
        assert any(covers(pattern, key) for key in keys), f"{pattern} names no key"
    assert not [key for key in keys if any(covers(p, key) for p in NONE) and any(covers(p, key) for p in ROUNDING)]
    assert {effect_of(key) for key in ("slurm.partition", "wait_s", "reward.num_workers")} == {"none"}
    assert {
        effect_of(key) for key in ("agents.qwen.tp", "lanes", "agents.qwen.megatron.num_layers_in_first_pipeline_stage")
    } == {"rounding"}
    assert {effect_of(key) for key in ("seed", "num_steps", "algorithm.delta", "agents.qwen.optimizer.lr")} == {
        "results"
    }


def test_who_asks_for_transformer_engine_where_there_is_none_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert list(missing_kernels(load_config(QUICKSTART))) == []
    (line,) = missing_kernels(load_config(QUICKSTART, ["agents.qwen.optimizer.kernels=te"]))
    assert "= 'te' (qwen): TransformerEngine is not installed here" in line
