"""Every term of a plan against a hand calculation, on a model of two layers (plan_cases.py) and round numbers."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from plan_cases import ANSWER, CLUSTER, PROMPT, write_cluster, write_small_job

from hacpo_lab.planning.cluster_file import load_cluster
from hacpo_lab.planning.configuration import Lengths, Work, load_planned, work_of
from hacpo_lab.planning.plan import Plan, make_plan, stretches, wall_seconds
from hacpo_lab.planning.traffic import learn_batches, message_bytes, score_batches
from hacpo_mega.memory.actor_bytes import actor_memory
from hacpo_mega.records import Rollout, Stop, Trajectory, Verdict
from hacpo_mega.rollout.exchange import encode

NUMBERS = 106_816
OF_ANSWER, OF_PROMPT, READ = 4_472_832, 1_458_176, 4_280_576  # forward FLOPs of 24, 8 and 23 tokens


def plan_of(folder: Path, cluster: dict = CLUSTER, **layout) -> Plan:
    machines = load_cluster(write_cluster(folder, cluster))
    planned = load_planned(write_small_job(folder, **layout), [], machines)
    work = work_of(planned.config, Lengths(PROMPT, ANSWER))
    return make_plan(planned, {agent.name: work for agent in planned.config.agents}, machines)


def sent(plan: Plan) -> dict[tuple[str, str], tuple[float, float]]:
    return {(m.phase, m.what): (m.num_bytes, m.count) for m in plan.agents[0].messages}


def test_seconds_of_one_device(tmp_path):
    """8 answers, 2 at once: 64 rounds, more than the longest answer has. The matrices are slower than the memory."""
    phases = plan_of(tmp_path).agents[0].phases
    decode, prefill = 8 * (OF_ANSWER - OF_PROMPT) / 0.5e9, 4 * OF_PROMPT / 0.5e9
    assert phases["roll_out"] == pytest.approx({"compute": decode + prefill, "host": 64 * 0.01 + 128 * 0.001})
    assert phases["judge"] == pytest.approx({"host": 8 * 0.1 / 2})
    assert phases["score"] == pytest.approx({"compute": 8 * READ / 0.25e9})
    assert phases["exchange"] == pytest.approx({"host": 8 * 0.01, "link between": 1464 / 0.5e9 + 4e-6})
    step = NUMBERS * (4 + 4 + 8 + 16) / 1e9
    assert phases["learn"] == pytest.approx({"compute": 3 * 16 * READ / 0.5e9, "optimizer": step})
    assert phases["publish"] == pytest.approx({"memory": 2 * 4 * NUMBERS / 1e9, "host": 0.5})
    assert phases["other"] == {"host": 1.0}


def planned_conversation(tmp_path: Path, lengths: Lengths) -> tuple[Work, dict]:
    machines = load_cluster(write_cluster(tmp_path, CLUSTER))
    talk = "conversation={environment='calculator',max_turns=3,max_total_tokens=32}"
    planned = load_planned(write_small_job(tmp_path), [talk], machines)
    work = work_of(planned.config, lengths)
    plan = make_plan(planned, {agent.name: work for agent in planned.config.agents}, machines)
    return work, plan.agents[0].phases["roll_out"]


def test_an_engine_reads_what_others_say_and_waits_for_it(tmp_path):
    """Two turns of 6 own tokens and 4 tokens between: 16 as above, of which 12 are sampled, in 8 x 12 / 2 rounds."""
    work, terms = planned_conversation(tmp_path, Lengths(PROMPT, 6, 2, 4, 3.0))
    assert (work.answer_tokens, work.own_tokens, work.longest) == (16, 12, 32)
    flops, read = 8 * (OF_ANSWER - OF_PROMPT), 8 * (OF_ANSWER - OF_PROMPT) * 4 / 16 + 4 * OF_PROMPT
    compute = flops * 12 / 16 / 0.5e9 + read / 0.5e9
    assert terms == pytest.approx({"compute": compute, "host": 48 * 0.01 + 96 * 0.001, "environment": 3.0})


def test_conversations_have_half_of_what_they_may_have_unless_said(tmp_path):
    """(1 + 3) / 2 turns of 2 tokens; half of 32 tokens leaves 12 to others."""
    work, _ = planned_conversation(tmp_path, Lengths(PROMPT, 2))
    assert (work.turns, work.own_tokens, work.others_tokens) == (2, 4, 12)
    for lengths, problem in {
        Lengths(PROMPT, 2, turns=4): r"--turns \(4\) must be 1 to conversation.max_turns \(3\)",
        Lengths(PROMPT, 12, turns=3): "conversations of 36 tokens on average",
    }.items():
        with pytest.raises(ValueError, match=problem):
            planned_conversation(tmp_path, lengths)
    plain = load_planned(write_small_job(tmp_path), [], load_cluster(write_cluster(tmp_path, CLUSTER))).config
    with pytest.raises(ValueError, match=r"--environment-s: the run has no conversation\.environment"):
        work_of(plain, Lengths(environment_s=1.0))


def test_what_the_first_update_scores_is_not_scored_before(tmp_path):
    """Alone, two updates a step: half of the 8 answers."""
    machines = load_cluster(write_cluster(tmp_path, CLUSTER))
    options = ["algorithm.method=gspo", "training.prompts_per_update=2"]
    planned = load_planned(write_small_job(tmp_path), options, machines)
    work = work_of(planned.config, Lengths(PROMPT, ANSWER))
    assert (work.updates, work.answers, work.scored) == (2, 8, 4)
    phases = make_plan(planned, {agent.name: work for agent in planned.config.agents}, machines).agents[0].phases
    assert phases["score"] == pytest.approx({"compute": 4 * READ / 0.25e9})


def test_an_engine_is_bound_by_memory_where_that_is_slower(tmp_path):
    slow = {**CLUSTER, "device": {**CLUSTER["device"], "memory_gb_per_s": 0.1}}
    read = 64 * 4 * NUMBERS + 128 * (8 + 16 / 2) * 2 * 2 * 2 * 16 * 4  # weights, cache of two layers
    terms = plan_of(tmp_path, slow).agents[0].phases["roll_out"]
    assert terms["memory"] == pytest.approx(read / 0.1e9)
    assert terms["compute"] == pytest.approx(4 * OF_PROMPT / 0.5e9)


def test_activations_pass_through_memory(tmp_path):
    rates = {**CLUSTER["rates"], "learn_passes": 5.0, "score_passes": 2.0}
    agent = plan_of(tmp_path, {**CLUSTER, "rates": rates}).agents[0]
    kept = actor_memory(agent.budget.actor).kept / 64
    assert agent.phases["learn"]["memory"] == pytest.approx(5 * 16 * 23 * kept / 1e9)
    assert agent.phases["score"]["memory"] == pytest.approx(2 * 8 * 23 * kept / 1e9)


def test_what_the_host_does_for_answers_micro_batches_and_tensors(tmp_path):
    """8 answers of a pool of 16, all learnt from; 3 micro-batches are scored, 3 of own and 3 of others' learnt."""
    host = {"batch_s": 0.25, "pool_s": 0.5, "view_token_s": 0.25, "request_s": 0.125, "tensor_s": 2.0}
    agent = plan_of(tmp_path, {**CLUSTER, "rates": {**CLUSTER["rates"], **host}}).agents[0]
    assert agent.phases["score"]["host"] == 3 * 0.25
    assert agent.phases["learn"]["host"] == 2 * (3 + 3) * 0.25
    assert agent.phases["exchange"]["host"] == pytest.approx(16 * 0.5 + 8 * 0.01 + 8 * 16 * 0.25)
    assert agent.phases["publish"]["host"] == 0.5 + (2 * 9 + 3) * 2.0
    without = plan_of(tmp_path).agents[0].phases["roll_out"]["host"]
    assert agent.phases["roll_out"]["host"] == pytest.approx(without + 8 * 0.125)


@pytest.mark.parametrize("scored_updates, replayed, score, learn", [(2, 0, [2, 2], [4, 3]), (1, 9, [2], [4, 4])])
def test_micro_batches_of_updates_after_the_first(scored_updates, replayed, score, learn):
    """Own 4 answers of 23 tokens in micro-batches of 64 are 2, others' are 2, all 8 together 3."""
    budget = SimpleNamespace(actor=SimpleNamespace(dp=1, num_tokens=64, replayed=replayed))
    work = Work(prompts=4, answers=8, pool=16, trained=16, updates=2, sources=2, scored_updates=scored_updates,
                prompt_tokens=8, answer_tokens=16, longest=16)  # fmt: skip
    assert (score_batches(budget, work), learn_batches(budget, work)) == (score, learn)


def test_messages_of_tensor_and_data_parallelism(tmp_path):
    plan = plan_of(tmp_path, tp=2, lanes=2)
    numbers_of_rank = (NUMBERS - 5 * 64) // 2 + 5 * 64
    assert sent(plan) == {
        ("roll_out", "sums of an engine"): (2 * 2 * (4 * 16 + 4 * 8) * 64 * 4, 4 * 32),
        ("score", "gathers and scatters of tp"): (4 * 2 * 0.5 * 4 * 23 * 64 * 4, 4 * 2 * 2),
        ("learn", "gathers and scatters of tp"): (10 * 2 * 0.5 * 8 * 23 * 64 * 4, 10 * 2 * (2 + 2)),
        ("learn", "gradients and weights of dp"): (0.5 * numbers_of_rank * (4 + 4), 2),
        ("exchange", "answers down the lane"): (4 * (47 + 8 + 8 * 16), 4),
        ("exchange", "answers inside a cell"): (64 + 8 * (47 + 8 + 8 * 16), 2),
    }
    assert all(message.inside for message in plan.agents[0].messages if message.what != "answers down the lane")


def test_a_pipeline_sends_and_waits(tmp_path):
    """16 x 23 tokens are 6 micro-batches of 64: the two stages wait for one of them."""
    plan = plan_of(tmp_path, pp=2, engine_tp=1)
    assert sent(plan)["learn", "sends of pp"] == (2 * 16 * 23 * 64 * 4, 2 * 6)
    # The second stage sends its layer, the last norm and the head, which is as large as the embedding.
    layer = (NUMBERS - 2 * 131 * 64 - 64) // 2
    assert sent(plan)["publish", "shards inside a cell"] == (4 * (layer + 64 + 131 * 64), 1)
    passed = 2 * 4 * (NUMBERS + layer + 64 + 131 * 64)
    assert plan.agents[0].phases["publish"]["memory"] == pytest.approx(passed / 1e9)
    learn = plan.agents[0].phases["learn"]
    compute, send = 3 * 16 * READ / 1e9, 2 * 16 * 23 * 64 * 4 / 1e9 + 12e-6
    assert learn["compute"] == pytest.approx(compute)
    assert learn["bubble"] == pytest.approx((compute + send) / 6)


def test_groups_leave_a_node_where_the_ranks_do(tmp_path):
    """Two devices a node: tensor ranks fill one, data parallelism and the second agent's cells are elsewhere."""
    small = {**CLUSTER, "nodes": 4, "devices_per_node": 2}
    where = {(m.phase, m.what): m.inside for m in plan_of(tmp_path, small, tp=2, lanes=2).agents[1].messages}
    assert where["learn", "gathers and scatters of tp"]
    assert not where["learn", "gradients and weights of dp"]


def test_memory_of_one_device(tmp_path):
    parts = plan_of(tmp_path, lanes=2).agents[0].budget.parts
    sizes = {name: parts[name] for name in ("weights", "gradients", "moments", "engine cache", "engine awake")}
    assert sizes == {"weights": 4 * NUMBERS, "gradients": 4 * NUMBERS, "moments": 4 * NUMBERS,
                     "engine cache": 256 * 2**20, "engine awake": 256 * 2**20 + 4 * NUMBERS}  # fmt: skip


def test_the_slowest_decides_at_every_meeting(tmp_path):
    assert wall_seconds([(1.0, 2.0, 0.5, 3.0), (2.0, 1.0, 0.5, 4.0)]) == 2.0 + 2.0 + 0.5 + 4.0
    phases = dict(zip(("roll_out", "judge", "score", "exchange", "learn", "publish", "other"), range(1, 8)))
    assert stretches(phases) == (3, 3, 4, 18)
    plan = plan_of(tmp_path)
    assert plan.wall_s == pytest.approx(plan.agents[0].busy_s)
    assert [plan.idle_share(agent) for agent in plan.agents] == [0.0, 0.0]  # they are equal


def test_the_host_takes_a_checkpoint_and_the_longest_term_is_named(tmp_path):
    plan = plan_of(tmp_path)
    assert plan.host_gib() == pytest.approx(13 * NUMBERS * 8 / 2**30)
    agent = plan.agents[0]
    assert agent.bound_by == ("other", "host", pytest.approx(1.0 / agent.busy_s))


def test_answers_take_as_many_bytes_as_the_exchange_sends():
    tokens = np.arange(ANSWER, dtype=np.int32)
    rollouts = [Rollout(0, place, tokens, "abcd" * ANSWER, Stop.EOS) for place in range(3)]
    sent = encode([Trajectory(0, rollout, Verdict.WRONG, 0.0, -1.0, ANSWER, 1.0) for rollout in rollouts])
    assert len(sent) == message_bytes(3, ANSWER)
