"""Changes that a run from a checkpoint may have made to its configuration, its models and its steps."""

import json
import re
import shlex
from pathlib import Path

import pytest
from checkpoint_cases import NAMES, complaint, config_in, make_step, start_of
from run_cases import CHARACTERS, agent_table, write_config

from hacpo_mega.checkpoint.files import plain, read_checkpoint
from hacpo_mega.config import load_config
from hacpo_mega.config.changes import changes, refusals, unknown_keys
from hacpo_mega.config.checks.tokenizer_checks import lacks_time, with_times, with_times_of
from hacpo_mega.config.load import completed


@pytest.mark.parametrize(
    "override",
    [
        "num_steps=50",
        "evaluation.every_steps=3",
        "checkpoint.keep_last=5",
        "training.diagnose_every=2",
        "reward.num_workers=3",
        "lanes=2",
        "stall_s=60.0",
        "logging.trace=true",
        "agents.llama.cells_per_lane=2",
    ],
)
def test_what_trains_nothing_may_change(override, tmp_path):
    make_step(config_in(tmp_path), 2)
    assert start_of(config_in(tmp_path, override)).step == 2


def test_what_trains_is_refused_unless_accepted(tmp_path):
    folder = make_step(config_in(tmp_path), 2)
    config = config_in(tmp_path, "seed=11", "agents.qwen.optimizer.lr=1e-5", "algorithm.delta=0.25")
    assert complaint(config).splitlines() == [
        f"{folder} is of another configuration:",
        "seed was 7, is 11: go on all the same with --accept seed, or start anew with --fresh",
        "agents.qwen.optimizer.lr was 0.0004, is 1e-05: go on all the same with --accept agents.qwen.optimizer.lr, or "
        "start anew with --fresh",
        "algorithm.delta was 0.5, is 0.25: go on all the same with --accept algorithm.delta, or start anew with "
        "--fresh",
        "To go on as before, add seed=7 agents.qwen.optimizer.lr=0.0004 algorithm.delta=0.5",
    ]
    last = complaint(config, accept=("seed", "agents.*.optimizer")).splitlines()[2:]
    assert last == ["To go on as before, add algorithm.delta=0.5"]
    assert start_of(config, accept=("seed", "agents.*.optimizer.lr", "algorithm")).step == 2


def test_the_time_of_a_chat_template_is_kept_and_another_is_refused(tmp_path):
    """By the step that the run goes on from, which has what its first start has read."""
    folder, first, later = tmp_path / "a", "2024-02-29T23:59:58", "2024-03-01T00:00:00"
    agent = agent_table(tmp_path, "a", "qwen3", CHARACTERS, chat_template=True)
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%M') }}+{{ messages[0].content }}=")
    file = write_config(tmp_path, [agent], algorithm={"method": "gspo"})
    begun = with_times(load_config(file, []), first)
    assert [agent.chat_template_time for agent in begun.agents] == [first] and not lacks_time(begun)
    make_step(begun, 2)
    again = load_config(file, [])
    assert lacks_time(again)
    start = start_of(again)
    assert with_times(with_times_of(again, start.config), later) == begun
    with pytest.raises(
        ValueError, match=f'agents.a.chat_template_time was "{first}", is "{later}": go on all the same'
    ):
        start_of(load_config(file, [f"agents.a.chat_template_time={later!r}"]))


@pytest.mark.parametrize(
    "key, says",
    [
        ("sed", "--accept 'sed': unknown key; did you mean 'seed'?"),
        ("seed=3", "--accept 'seed=3': expected a key alone. Nearest: --accept seed"),
        ("algorithm.dlta", "--accept 'algorithm.dlta': unknown key; did you mean 'algorithm.delta'?"),
        ("agents.qwen.tpp", "--accept 'agents.qwen.tpp': unknown key; did you mean 'agents.qwen.tp'?"),
        ("agents.tp", "--accept 'agents.tp': no agent is named 'tp'; there are: qwen, llama"),
        ("", "--accept '': unknown key"),
    ],
)
def test_an_accepted_key_that_nothing_has_is_refused_by_a_new_run_too(key, says, tmp_path):
    assert complaint(config_in(tmp_path), accept=(key,)) == says
    make_step(config_in(tmp_path), 2)
    assert complaint(config_in(tmp_path), accept=(key,)) == says


def test_keys_tables_and_keys_of_the_stored_run_may_be_accepted():
    for key in ("agents", "agents.q*", "agents.*.tp", "agents.qwen.vllm.block_size", "reward.parts.a.weight", "*"):
        assert list(unknown_keys([key], ["qwen"], {})) == []
    before = {"agents": [{"name": "gone", "tp": 1}], "algorithm": {"old": 1}}
    assert list(unknown_keys(["algorithm.old", "agents.gone.tp"], ["qwen"], before)) == []


def test_a_run_of_another_default_is_told_how_it_goes_on_as_before(tmp_path):
    """Preset `authors` took the share of right answers as P_hat before it took the mean reward."""
    metric = "algorithm.capability_metric"
    make_step(config_in(tmp_path, "algorithm.preset=authors", f"{metric}=positive_rate"), 2)
    *_, line, back = complaint(config_in(tmp_path, "algorithm.preset=authors")).splitlines()
    assert line.startswith(f'{metric} was "positive_rate", is "mean_reward": ')
    words = shlex.split(back.removeprefix("To go on as before, add "))
    assert words == [f'{metric}="positive_rate"']
    assert start_of(config_in(tmp_path, "algorithm.preset=authors", *words)).step == 2


def test_a_run_in_place_of_one_of_its_steps_is_told_the_newest(tmp_path):
    folder = make_step(config_in(tmp_path), 2)
    with pytest.raises(ValueError, match=re.escape(f"is no checkpoint of a run. Nearest: {folder}")):
        read_checkpoint(folder.parent.parent)


def test_layout_changes_are_free_and_other_megatron_fields_are_asked_for():
    before, now = plain(config_in(Path("run"))), plain(config_in(Path("run")))
    stages = {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 2}
    now["agents"][0] |= {"tp": 2, "pp": 2, "engine_tp": 1, "megatron": {**stages, "recompute_granularity": "full"}}
    free = ("tp", "pp", "engine_tp", *(f"megatron.{key}" for key in stages))
    assert {change.key: change.kind for change in changes(before, now)} == {
        **{f"agents.qwen.{key}": "free" for key in free},
        "agents.qwen.megatron.recompute_granularity": "asked",
    }


def test_agents_are_compared_by_name_and_their_order_counts():
    config = config_in(Path("run"))
    before = plain(config)
    swapped = before | {"agents": before["agents"][::-1]}
    (change,) = changes(before, swapped)
    assert (change.key, change.kind) == ("agents", "fixed")
    assert list(refusals([change], ["agents"])) == [
        'agents was ["qwen", "llama"], is ["llama", "qwen"]: a run cannot go on with another; put it back, or start '
        "anew with --fresh"
    ]
    assert changes(before, json.loads(json.dumps(before))) == []


def test_a_key_that_one_side_lacks_is_a_change():
    before, now = (
        plain(config_in(Path("run"), *override)) for override in ([], ["agents.qwen.prompt_template=Add {prompt}"])
    )
    assert [str(change) for change in changes(before, now)] == [
        'agents.qwen.prompt_template was not given, is "Add {prompt}"'
    ]
    assert [str(change) for change in changes(now, before)] == [
        'agents.qwen.prompt_template was "Add {prompt}", is not given'
    ]


def test_fewer_steps_than_are_done_is_refused(tmp_path):
    folder = make_step(config_in(tmp_path), 6)
    assert (
        complaint(config_in(tmp_path, "num_steps=4"))
        == f"{folder} has 6 steps done, num_steps is 4: give more, or --fresh"
    )


def test_another_model_in_the_same_folder_is_refused(tmp_path):
    models = [f"agents.{name}.model={tmp_path / name}" for name in NAMES]
    config = config_in(tmp_path / "run", *models)
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    folder = make_step(config, 2)
    assert start_of(config).step == 2
    (tmp_path / "llama" / "config.json").write_text('{"hidden_size": 64}')
    assert complaint(config) == (
        f"{folder} is of another model: the config.json of agents.llama.model is not what it was"
    )


def test_keys_newer_than_a_checkpoint_are_no_change_at_their_defaults():
    config = config_in(Path("run"), "rollout.temperature=0.9")
    now, before = plain(config), plain(config)
    del before["rollout"]["temperature"], before["training"]["share_prompts"], before["agents"][0]["offload"]
    assert [str(change) for change in changes(completed(before), now)] == ["rollout.temperature was 1.0, is 0.9"]
    assert completed(now) == now
    gone = plain(config) | {"a_key_of_before": 1}
    assert [str(change) for change in changes(completed(gone), now)] == ["a_key_of_before was 1, is not given"]


@pytest.mark.parametrize(("before", "lines"), [(1.0, []), (0.5, ["reward.success was 0.5, is not given"])])
def test_a_key_that_has_moved_is_no_change_by_itself(before, lines):
    now = plain(config_in(Path("run")))
    old = now | {"algorithm": now["algorithm"] | {"success_reward": before}}
    assert [str(change) for change in changes(completed(old), now)] == lines


@pytest.mark.parametrize(
    ("band", "lines"), [("fixed", []), ("calibrated", ["algorithm.band was calibrated, is not given"])]
)
def test_a_calibrated_band_of_before_is_a_change_and_a_fixed_one_is_none(band, lines):
    now = plain(config_in(Path("run")))
    gone = {"band": band, "band_share": 0.8, "band_smoothing": 0.8}
    found = list(changes(completed(now | {"algorithm": now["algorithm"] | gone}), now))
    assert [str(change).replace('"', "") for change in found] == lines
    assert [change.kind for change in found] == ["asked"] * len(lines)


@pytest.mark.parametrize(
    ("table", "key", "before", "lines"),
    [
        ("training", "pack_by", "flops", []),
        ("rollout", "biased_cut_after", 1.0, []),
        ("rollout", "biased_cut_after", 0.9, ["rollout.biased_cut_after was 0.9, is not given"]),
        ("algorithm", "capability_metric", "positive_rate", []),  # a default of before, which `naive` does not read
    ],
)
def test_keys_that_are_gone_are_a_change_only_if_they_were_of_results(table, key, before, lines):
    now = plain(config_in(Path("run"), "algorithm.method=naive"))
    found = changes(completed(now | {table: now[table] | {key: before}}), now)
    assert [str(change) for change in found] == lines
