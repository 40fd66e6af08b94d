"""Whole runs with real processes, Megatron actors and vLLM engines, started as a user starts them."""

import gzip
import itertools
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from job import play_command, run_here, start_ranks
from run_cases import CHARACTERS, PAIRS, agent_table, train, train_as_a_user, write_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hacpo_mega.logbook.files.rollout_log import read_rollouts
from hacpo_mega.logbook.run.rank_files import read_rank_files
from hacpo_mega.samples.tokenizers import load_tokenizer

pytestmark = pytest.mark.nightly

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def three_agents(tmp_path_factory) -> tuple[Path, dict]:
    """A run of three agents of two families and two tokenizers, long enough to climb the reward."""
    folder = tmp_path_factory.mktemp("three")
    agents = [
        agent_table(folder, "qwen", "qwen3", CHARACTERS),
        agent_table(folder, "llama", "llama", CHARACTERS + PAIRS),
        agent_table(folder, "twin-of-qwen", "qwen3", CHARACTERS),
    ]
    config = write_config(folder, agents, num_steps=5, algorithm={"delta": 0.9})
    return config, train(config)


def test_three_agents_teach_each_other(three_agents):
    _, steps = three_agents
    first, last = steps[1].values, steps[5].values
    names = ("qwen", "llama", "twin-of-qwen")
    for name in names:
        assert last[f"agent/{name}/reward_mean"] > first[f"agent/{name}/reward_mean"] + 0.1
        assert first[f"agent/{name}/num_answers"] == 32
        for source in set(names) - {name}:
            # of the first step: later a source may give nothing that moves a gradient
            shares = [first[f"agent/{name}/from/{source}/{where}"] for where in ("below", "inside", "above")]
            assert math.isclose(sum(shares), 1.0)
            assert math.isclose(last[f"omega/{name}/{source}"] * last[f"omega/{source}/{name}"], 1.0)


def test_first_own_ratio_is_exactly_one_in_a_real_run(three_agents):
    _, steps = three_agents
    errors = [value for m in steps.values() for key, value in m.values.items() if key.endswith("first_ratio_error")]
    assert len(errors) == 15
    assert set(errors) == {0.0}


def test_engine_and_trainer_differ_by_rounding_alone_in_a_real_run(three_agents):
    """float32 on both sides: the bound is that of jobs/test_engine.py and jobs/test_publish.py."""
    _, steps = three_agents
    for step in range(1, 6):
        for name in ("qwen", "llama", "twin-of-qwen"):
            values = {key: steps[step].values[f"agent/{name}/engine_{key}"] for key in ("gap_mean", "gap_max", "kl")}
            assert 0 < values["gap_mean"] <= values["gap_max"] < 1e-4
            assert 0 <= values["kl"] < 1e-8
    assert not any("engine_weight" in key for key in steps[5].values), "no correction was asked for"


def test_capability_is_the_window_mean_of_the_rewards(three_agents):
    _, steps = three_agents
    rewards = [steps[step].values["agent/llama/reward_mean"] for step in range(1, 6)]
    assert steps[5].values["capability/llama"] == pytest.approx(sum(rewards) / 5, rel=1e-6)


@contextmanager
def followed(run_dir: Path) -> Iterator[list[tuple[int, str, str]]]:
    """Rank, phase and step as the files of the ranks tell them, while the body runs."""
    found, ends = [], threading.Event()

    def follow() -> None:
        while not ends.wait(0.05):
            told = ((rank, file["phase"], file["when"]) for rank, file in read_rank_files(run_dir).items())
            found.extend(one for one in told if one not in found)

    thread = threading.Thread(target=follow)
    thread.start()
    yield found
    ends.set()
    thread.join()


@pytest.fixture(scope="module")
def ranks_told() -> list[tuple[int, str, str]]:
    """Rank, phase and step as the ranks of the watched run have told them."""
    return []


@pytest.fixture(scope="module")
def watched(three_agents, ranks_told) -> dict:
    """The same run once more, with everything that looks at it switched on."""
    config, _ = three_agents
    looks = ("training.diagnose_every=2", "logging.trace=true", "logging.trace_steps=[2,3]")
    run_dir = config.parent / "again"
    with followed(run_dir) as told:
        steps = train(config, f"run_dir={run_dir}", *looks, "logging.rollout_tokens=true")
    ranks_told.extend(told)
    return steps


def test_every_rank_tells_its_phase_while_a_run_goes_on(watched, ranks_told, three_agents):
    timed = {name for metrics in watched.values() for name in metrics.timing if "/phase/" in name}
    after_the_line = {"trace", "checkpoint", "export"}
    phases = {name.split("/")[-1].removesuffix("_s") for name in timed} | after_the_line
    assert {rank for rank, _, _ in ranks_told} == {0, 1, 2}
    assert {phase for _, phase, _ in ranks_told} <= phases
    steps = {when for _, phase, when in ranks_told if phase == "learn"}
    assert steps <= {f"of step {step}" for step in range(1, 6)}
    assert not (three_agents[0].parent / "again" / "ranks").exists(), "a run that ends well leaves none"


def test_metrics_and_weights_repeat_with_the_seed_despite_diagnosed_steps(three_agents, watched):
    config, steps = three_agents
    names = ("qwen", "llama", "twin-of-qwen")
    pairs = [(learner, source) for learner in names for source in names if learner != source]
    ends = [f"{learner}/from/{source}" for learner, source in pairs]
    new = {f"agent/{end}/{what}" for end in ends for what in ("grad_norm", "grad_share", "grad_cosine")}
    new |= {f"agent/{name}/self/grad_norm" for name in names}
    assert watched.keys() == steps.keys()
    for step, metrics in watched.items():
        diagnosed = {name: value for name, value in metrics.values.items() if name in new}
        assert {k: v for k, v in metrics.values.items() if k not in new} == steps[step].values
        # a source all of whose answers lie outside the band has no gradient, and so no angle; nor has it one to own
        # answers that teach nothing in the update
        angles = {f"agent/{end}/grad_cosine" for end in ends}
        silent = {f"agent/{end}/grad_cosine" for end in ends if not diagnosed.get(f"agent/{end}/grad_share")}
        if step in (2, 4):
            assert new - angles <= diagnosed.keys() <= new - silent and angles & diagnosed.keys()
        else:
            assert not diagnosed
        assert ("agent/llama/phase/diagnose_s" in metrics.timing) == (step in (2, 4))
        for name, value in diagnosed.items():
            assert abs(value) <= (1 + 1e-9 if name.endswith("cosine") else math.inf), name
        for learner in names if diagnosed else ():
            shares = [diagnosed[f"agent/{learner}/from/{s}/grad_share"] for s in set(names) - {learner}]
            assert min(shares) >= 0.0 and sum(shares) <= 1.0
    for name in names:
        one, other = (load_file(config.parent / run / "agents" / name / WEIGHTS) for run in ("run", "again"))
        assert all(torch.equal(one[tensor], other[tensor]) for tensor in one), name


def test_phases_add_up_to_the_time_between_two_lines(three_agents):
    """By another clock: that of the lines. No phase is counted twice, and what is in none is called other."""
    _, steps = three_agents
    lines = [steps[step].timing["time_unix_s"] for step in (0, 5)]
    for name in ("qwen", "llama", "twin-of-qwen"):
        seconds: dict[str, float] = {}
        for step in range(1, 6):
            timing, prefix = steps[step].timing, f"agent/{name}/phase_mean/"
            of_step = {key.removeprefix(prefix): value for key, value in timing.items() if key.startswith(prefix)}
            assert sum(of_step.values()) == pytest.approx(timing[f"agent/{name}/step_s"], abs=1e-4)
            seconds = {phase: seconds.get(phase, 0.0) + value for phase, value in of_step.items()}
            held = [timing[f"agent/{name}/memory/{phase}_bytes"] for phase in ("roll_out", "learn")]
            assert all(1e8 < number < 1e11 for number in held), "a process that has vLLM and Megatron"
        assert sum(seconds.values()) == pytest.approx(lines[1] - lines[0], rel=0.03)


def test_waits_are_a_part_of_the_seconds_of_their_phases(three_agents):
    """By the clock of each phase, in each line: those of the start and of the evaluation are in the first one."""
    _, steps = three_agents
    for step, name in itertools.product(range(6), ("qwen", "llama", "twin-of-qwen")):
        timing, prefix = steps[step].timing, f"agent/{name}/wait/"
        waits = {key.removeprefix(prefix): s for key, s in timing.items() if key.startswith(prefix)}
        assert {"wait_s", "load_s" if step == 0 else "exchange_s"} <= waits.keys()
        for phase, seconds in waits.items():
            assert seconds <= timing[f"agent/{name}/phase/{phase}"] + 1e-4, (step, name, phase)


def test_a_traced_step_shows_what_every_rank_did_and_for_whom_it_waited(three_agents, watched):
    config, _ = three_agents
    for step in (2, 3):
        file = config.parent / "again" / "trace" / f"step_{step:06d}.json.gz"
        trace = json.loads(gzip.decompress(file.read_bytes()))
        drawn = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        for rank in range(3):
            mine = [event for event in drawn if event["tid"] == rank]
            assert {event["pid"] for event in mine} == {rank}, "every agent has one rank here"
            check_phases([event for event in mine if event["cat"] == "phase"], is_diagnosed=step == 2)
            for name in ("forward and backward", "optimizer", "reduce gradients"):
                assert sum(event["name"] == name for event in mine) >= 2, "two updates a step"
        accuracy_us = 1e6 * max(trace["otherData"]["clock_accuracy_s"].values())
        # Nobody leaves a gathering before the last has come: on one clock, up to how well it is known.
        gathered = [e for e in drawn if e["name"] == "allgather" and e["args"]["group"] == "lane/0"]
        for turn in zip(*([e for e in gathered if e["tid"] == rank] for rank in range(3)), strict=True):
            begins, ends = [e["ts"] for e in turn], [e["ts"] + e["dur"] for e in turn]
            assert max(begins) <= min(ends) + 2 * accuracy_us + 1
        assert any(event["cat"] == "wait" for event in drawn)


def check_phases(phases: list[dict], is_diagnosed: bool) -> None:
    """Checks that the phases of a step come one after the other, with little between them."""
    expected = ["roll_out", "judge", "exchange", "score", "exchange"]
    expected += (["diagnose"] if is_diagnosed else []) + ["learn"]
    names = [event["name"] for event in phases if event["name"] != "checkpoint"]  # due after some minutes, too
    assert names[: len(expected)] == expected and names[-4:] == ["publish", "write", "wait", "write"]
    for one, other in itertools.pairwise(phases):
        assert one["ts"] + one["dur"] <= other["ts"] + 1, "to a rounded microsecond"


def test_the_report_shows_the_traced_step_and_the_tokens(three_agents, watched):
    config, _ = three_agents
    run = config.parent / "again"
    assert run_here("report", run).returncode == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert 'class="strip up"' in page and "ratio 1.000" in page
    assert (run / "report" / "timeline.png").is_file()


def test_tokens_are_logged_with_what_their_agent_said_of_them(three_agents, watched):
    config, _ = three_agents
    answers = [answer for prompt in read_rollouts(config.parent / "again", 3) for answer in prompt["answers"]]
    trained = [answer for answer in answers if "token_ratio" in answer]
    assert trained
    for answer in answers:
        assert len(answer["tokens"]) == answer["num_tokens"]
        assert "".join(piece for piece in answer["tokens"] if piece not in ("<eos>", "<pad>")) == answer["text"]
    for answer in trained:
        mean = sum(answer["token_logprob"]) / len(answer["token_logprob"])
        assert mean == pytest.approx(answer["mean_logprob"], rel=1e-5)  # the log rounds to 6 digits
        log_ratio = sum(map(math.log, answer["token_ratio"])) / len(answer["token_ratio"])
        assert math.exp(log_ratio) == pytest.approx(answer["ratio"][answer["agent"]], rel=1e-4)


def test_rollouts_are_logged_with_every_learners_view(three_agents):
    config, _ = three_agents
    prompts = read_rollouts(config.parent / "run", 3)
    assert [prompt["prompt_index"] for prompt in prompts] == list(range(8))
    for prompt in prompts:
        assert len(prompt["answers"]) == 3 * 4
        for answer in prompt["answers"]:
            assert set(answer["advantage"]) == {"qwen", "llama", "twin-of-qwen"}


def test_exported_agents_run_by_themselves(three_agents):
    config, _ = three_agents
    for name in ("qwen", "llama", "twin-of-qwen"):
        folder = config.parent / "run" / "agents" / name
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = load_tokenizer(folder)
        ids = torch.tensor([tokenizer("47+85=").input_ids])
        answer = tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0][ids.shape[1] :])
        written = answer.partition("<eos>")[0]
        # Half at least: a token of llama's may be 10.
        assert 2 * written.count("1") >= len(written) > 0, f"the reward asked for ones, {name} writes {written!r}"
        trained, started = (
            load_file(folder / "model.safetensors"),
            load_file(config.parent / name / "model.safetensors"),
        )
        assert trained.keys() == started.keys()
        assert not torch.equal(trained["model.norm.weight"], started["model.norm.weight"])


def test_unequal_layouts_and_the_authors_preset(tmp_path):
    """Tensor parallel 2 beside two cells per lane, KL to the initial policy on, the engine corrected by sequence."""
    agents = [
        agent_table(tmp_path, "wide", "qwen3", CHARACTERS, tp=2),
        agent_table(tmp_path, "twice", "llama", CHARACTERS + PAIRS, cells_per_lane=2),
    ]
    config = write_config(tmp_path, agents, algorithm={"preset": "authors", "delta": 0.9})
    steps = train(config, "rollout.engine_correction=sequence")
    for name in ("wide", "twice"):
        values = steps[2].values
        assert values[f"agent/{name}/num_answers"] == 32
        assert values[f"agent/{name}/grad_norm"] > 0.0
        assert values[f"agent/{name}/kl"] > 0.0
        assert values[f"agent/{name}/self/first_ratio_error"] == 0.0
        check_weights(values, name, num_tokens=12)
        check_weighted_advantages(tmp_path / "run", name, num_tokens=12)


def check_weighted_advantages(run: Path, name: str, num_tokens: int) -> None:
    """Answers of one agent to one prompt with one reward have one advantage; weighted, they differ by rounding."""
    quotients = []
    for prompt in read_rollouts(run, 1) + read_rollouts(run, 2):
        by_reward: dict[float, list[float]] = {}
        for answer in prompt["answers"]:
            if answer["agent"] == name and answer["advantage"][name] != 0.0:
                by_reward.setdefault(answer["reward"], []).append(answer["advantage"][name])
        quotients += [other / first for first, *others in by_reward.values() for other in others]
    assert len(quotients) > 2
    assert max(abs(quotient - 1.0) for quotient in quotients) < 4 * num_tokens * 1e-4
    assert any(quotient != 1.0 for quotient in quotients), "no weight reached an advantage"


def check_weights(values: dict[str, float], name: str, num_tokens: int) -> None:
    """Every weight is the ratio of two float32 probabilities of `num_tokens` tokens: 1, up to rounding."""
    assert values[f"agent/{name}/engine_weight_mean"] == pytest.approx(1.0, abs=2 * num_tokens * 1e-4)
    assert values[f"agent/{name}/engine_weight_ess"] == pytest.approx(1.0, abs=2 * num_tokens * 1e-4)
    assert values[f"agent/{name}/engine_weight_truncated"] == 0.0


@pytest.fixture(scope="module")
def by_method(tmp_path_factory) -> dict[str, dict]:
    """The metrics of a run of two agents by every method; one of them has another seed."""
    folder = tmp_path_factory.mktemp("two")
    agents = [agent_table(folder, "a", "qwen3", CHARACTERS), agent_table(folder, "b", "llama", CHARACTERS + PAIRS)]
    config = write_config(folder, agents, num_steps=2)
    options = {"grpo": (), "gspo_x2": (), "hacpo": ()}
    options |= {"sgt": ("reward.success=0.15", "seed=2")}
    return {
        method: train(config, f"run_dir={folder / method}", f"algorithm.method={method}", *how)
        for method, how in options.items()
    }


@pytest.mark.parametrize("method", ["grpo", "gspo_x2", "sgt", "hacpo"])
def test_a_method_trains_by_the_same_loop(method, by_method):
    """Counts of the method, a first own ratio of exactly 1, and what only this method has."""
    steps = by_method[method]
    for name, other in (("a", "b"), ("b", "a")):
        first, last = (steps[step].values for step in (1, 2))
        assert first[f"agent/{name}/num_answers"] == (64 if method == "gspo_x2" else 32)
        assert first[f"agent/{name}/self/first_ratio_error"] == last[f"agent/{name}/self/first_ratio_error"] == 0.0
        assert last[f"agent/{name}/grad_norm"] > 0.0
        learned = f"agent/{name}/from/{other}/ratio_mean" in first
        assert learned == (method == "hacpo") or method == "sgt"  # sgt: where a random agent happens to be rescued


def test_another_seed_has_other_answers_and_another_method_has_not(by_method):
    """In the first step, before anything is learnt."""
    rewards = {method: steps[1].values["agent/a/reward_mean"] for method, steps in by_method.items()}
    assert rewards["grpo"] == rewards["hacpo"] != rewards["sgt"]


def test_an_agent_alone_under_hacpo_equals_gspo_bit_for_bit(tmp_path):
    """One agent as two pipeline stages, each with an engine of its own, over one lane; only `method` differs.

    The engine is corrected by token: log-probs of both engines reach both stages, weights the loss on the last one.
    """
    agents = [agent_table(tmp_path, "alone", "qwen3", CHARACTERS, pp=2, engine_tp=1)]
    config = write_config(tmp_path, agents)
    hacpo = train(config, "rollout.engine_correction=token")
    check_weights(hacpo[2].values, "alone", num_tokens=1)
    gspo = train_as_a_user(
        config, f"run_dir={tmp_path / 'gspo'}", "algorithm.method=gspo", "rollout.engine_correction=token"
    )
    assert [m.values for m in hacpo.values()] == [m.values for m in gspo.values()]
    weights = [load_file(tmp_path / run / "agents" / "alone" / "model.safetensors") for run in ("run", "gspo")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.fixture(scope="module")
def unshared(tmp_path_factory) -> tuple[Path, dict]:
    """Two agents without sharing, one in two pipeline stages, that score before the first update."""
    folder = tmp_path_factory.mktemp("unshared")
    agents = [agent_table(folder, "a", "qwen3", CHARACTERS, pp=2), agent_table(folder, "b", "llama", CHARACTERS)]
    config = write_config(folder, agents, algorithm={"method": "gspo"}, logging={"rollout_tokens": True})
    return config, train(config, "training.score_in_first_update=false")


def test_scoring_in_the_update_and_judging_while_sampling_change_no_bit(unshared):
    """Metrics, log of answers and tokens, and weights. Without sharing the first update scores by itself.

    Judged by a grader in a process of its own, as each answer ends. The answers of a step's second update are
    scored before it as ever, by the policy that wrote them.
    """
    config, plain = unshared
    tmp_path = config.parent
    less = train(config, f"run_dir={tmp_path / 'less'}", "reward.while_sampling=true")
    assert [m.values for m in plain.values()] == [m.values for m in less.values()]
    assert plain[2].values["agent/a/self/first_ratio_error"] == 0.0
    assert plain[2].values["agent/a/num_updates"] == 2
    for step in (1, 2):
        answers = read_rollouts(tmp_path / "run", step)
        assert any(answer["mean_logprob"] for prompt in answers[:4] for answer in prompt["answers"])
        assert answers == read_rollouts(tmp_path / "less", step)
    for name in ("a", "b"):
        one, other = (load_file(tmp_path / run / "agents" / name / WEIGHTS) for run in ("run", "less"))
        assert all(torch.equal(one[tensor], other[tensor]) for tensor in one), name


def test_ratios_to_the_engine_need_no_score_and_show_its_gap(unshared):
    """In float32 they are the scored run's by rounding: of one first step the answers, the gap, the gradient."""
    config, plain = unshared
    bypass = train(config, f"run_dir={config.parent / 'bypass'}", "rollout.engine_correction=ratio")
    for name in ("a", "b"):
        one, other = plain[1].values, bypass[1].values
        assert other[f"agent/{name}/reward_mean"] == one[f"agent/{name}/reward_mean"]
        assert other[f"agent/{name}/grad_norm"] == pytest.approx(one[f"agent/{name}/grad_norm"], rel=1e-2)
        assert 0 < other[f"agent/{name}/engine_gap_mean"] <= other[f"agent/{name}/engine_gap_max"] < 1e-4
        assert other[f"agent/{name}/self/first_outside"] == 0.0
        assert f"agent/{name}/self/first_ratio_error" not in other and f"agent/{name}/engine_weight_mean" not in other
        scored, given = (
            [answer["mean_logprob"] for prompt in read_rollouts(run, 1) for answer in prompt["answers"]]
            for run in (config.parent / "run", config.parent / "bypass")
        )
        assert given == pytest.approx(scored, abs=1e-4) and given != scored


def test_a_wrong_device_count_is_one_line_before_any_model(tmp_path):
    config = write_config(tmp_path, [agent_table(tmp_path, "qwen", "qwen3", CHARACTERS, tp=2)])
    (rank,) = start_ranks(1, tmp_path, play_command, "train", str(config))
    rank.join()
    errors = (tmp_path / "0.err").read_text()
    assert rank.exitcode == 2
    asked = "this configuration needs 2 ranks (qwen: 1 lanes x 1 cells x tp 2 x pp 1 = 2), found WORLD_SIZE 1"
    assert asked in errors and "Traceback" not in errors
    assert not (tmp_path / "run").exists()


def test_report_in_short_for_machines(three_agents):
    config, steps = three_agents
    short = json.loads(run_here("report", config.parent / "run", "--json").stdout)
    assert short["agents"]["llama"]["mean_reward_end"] == pytest.approx(steps[5].values["agent/llama/eval/reward_mean"])
    assert short["agents"]["llama"]["num_answers"] == 5 * 32
    assert set(short["phase_s"]) >= {"roll_out", "judge", "score", "exchange", "learn", "publish"}
