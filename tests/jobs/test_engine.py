"""The live vLLM engine against Hugging Face: what it scores, what it samples, what it refuses, what it leaves alone.

One job of two real processes per agent (tests/support/jobs/engine_job.py) does everything; the tests judge what each
process saw.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from job import run_script
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.publish_plan import engine_layer_shapes
from hacpo_mega.records import Stop
from hacpo_mega.rollout.vllm.engine_loop import odd_row_counts_of

AGENTS = ["qwen3", pytest.param("llama", marks=pytest.mark.nightly)]
RANKS = [("qwen3", 0), ("qwen3", 1), *(pytest.param("llama", rank, marks=pytest.mark.nightly) for rank in (0, 1))]
EOS = 7
TEMPERATURE = 0.7
SAID = [11, 12, 13]  # turn_sources.py
# name -> family, tied, seed of the weights. vLLM's attention on the CPU needs a head size of at least 32.
MODELS = {
    "qwen3": ("qwen3", True, 1),
    "qwen3-other": ("qwen3", True, 2),
    "llama": ("llama", False, 1),
    "llama-other": ("llama", False, 2),
    "qwen2": ("qwen2", True, 1),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, (family, tied, seed) in MODELS.items():
        make_model(folder / name, family, tied=tied, seed=seed, num_heads=2, head_dim=32)
    make_model(folder / "narrow", "llama", num_heads=4, head_dim=16)
    return folder


class Seen(dict):
    """Observations of every process of an agent's job, by agent and rank; the job runs when it is first asked for."""

    def __init__(self, models: Path, out: Path) -> None:
        super().__init__()
        self._folders = models, out

    def __missing__(self, key: tuple[str, int]) -> dict:
        agent, (_, out) = key[0], self._folders
        run_script("engine_job", 2, *self._folders, agent)
        for rank in (0, 1):
            self[agent, rank] = torch.load(out / f"{agent}-{rank}.pt", weights_only=False)
        return self[key]


@pytest.fixture(scope="module")
def saw(models, tmp_path_factory) -> Seen:
    return Seen(models, tmp_path_factory.mktemp("saw"))


class Oracle:
    """Hugging Face's log-probs, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    @torch.no_grad()
    def table(self, tokens: list[int], temperature: float = 1.0) -> np.ndarray:
        """Log-probs [len(tokens), V]: row t is the distribution of the token after position t."""
        logits_TV = self.model(torch.tensor([tokens])).logits[0].double() / temperature
        return logits_TV.log_softmax(-1).numpy()

    def score(self, tokens: list[int], temperature: float = 1.0) -> np.ndarray:
        """Log-prob of every token after the first."""
        return self.table(tokens, temperature)[np.arange(len(tokens) - 1), tokens[1:]]


@pytest.fixture(scope="module")
def oracles(models) -> dict[str, Oracle]:
    return {name: Oracle(models / name) for name in MODELS}


def assert_scores(found: list[np.ndarray], sequences: list[list[int]], oracle: Oracle) -> None:
    assert len(found) == len(sequences)
    for scores, tokens in zip(found, sequences):
        np.testing.assert_allclose(scores, oracle.score(tokens), atol=1e-4, rtol=0)


def tokens_of(answers) -> list[list[int]]:
    return [token_ids.tolist() for token_ids, _, _ in answers]


@pytest.mark.parametrize("agent, rank", RANKS)
def test_scores_are_hugging_faces(saw, oracles, agent, rank):
    seen = saw[agent, rank]
    assert_scores(seen["start"], seen["sequences"], oracles[agent])
    assert_scores(seen["replica"], seen["sequences"][rank:], oracles[agent])


@pytest.mark.nightly
def test_qwen2_with_biases(saw, oracles):
    for rank in (0, 1):
        assert_scores(saw["llama", rank]["qwen2"], saw["llama", rank]["sequences"], oracles["qwen2"])


@pytest.mark.parametrize("agent, rank", RANKS)
def test_published_weights_replace_all_of_the_old(saw, oracles, agent, rank):
    """Also the packed copy of a tied output layer; and the engine keeps none of the caller's tensors (zeroed since)."""
    seen = saw[agent, rank]
    assert_scores(seen["published"], seen["sequences"], oracles[f"{agent}-other"])


@pytest.mark.parametrize("agent", AGENTS)
def test_sampled_tokens_come_with_their_logprobs(saw, oracles, agent):
    """Under the tempered distribution. The first prompt fills a cache block: a prefix of the old weights would show."""
    seen = saw[agent, 0]
    for prompt, (token_ids, _, logprobs) in zip(seen["prompts"], seen["answers"]):
        whole = oracles[f"{agent}-other"].score(prompt + token_ids.tolist(), TEMPERATURE)
        np.testing.assert_allclose(logprobs, whole[len(prompt) - 1 :], atol=1e-4, rtol=0)


@pytest.mark.parametrize("agent", AGENTS)
def test_asking_for_logprobs_changes_no_answer(saw, agent):
    asked, unasked = saw[agent, 0]["answers"], saw[agent, 0]["unasked"]
    assert tokens_of(unasked) == tokens_of(asked)
    assert [logprobs for _, _, logprobs in unasked] == [None] * len(asked)


@pytest.mark.parametrize("agent", AGENTS)
def test_both_ranks_of_an_engine_say_the_same_logprobs_to_the_bit(saw, agent):
    """The weight of a token's gradient must be the same on every rank that shares the token."""
    for (_, _, first), (_, _, second) in zip(saw[agent, 0]["answers"], saw[agent, 1]["answers"], strict=True):
        assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("agent", AGENTS)
def test_an_answer_is_a_function_of_weights_prompt_and_seed(saw, agent):
    seen, neighbour = saw[agent, 0], saw[agent, 1]
    answers = tokens_of(seen["answers"])
    assert tokens_of(seen["again"]) == answers
    assert tokens_of(seen["backwards"]) == answers
    assert tokens_of(seen["alone"]) == [answers[0], answers[3]]
    assert tokens_of(neighbour["answers"]) == answers, "both ranks of an engine see the same answers"
    different = [new != old for new, old in zip(tokens_of(seen["other step"]), answers)]
    assert np.mean(different) > 0.95


@pytest.mark.parametrize("agent, rank", RANKS)
def test_turns_that_join_and_leave_get_the_answers_of_one_call(saw, agent, rank):
    """To the bit where no layer rounds a lone row otherwise; the first rank of the engine is asked, and told."""
    seen = saw[agent, rank]
    served = seen["served"]
    assert tokens_of(seen["after"]) == tokens_of(seen["again"]), "the engine is as it was"
    turns = served["dribbling"]["turns"]
    assert sorted(turns) == ([] if rank else [f"{place}/0" for place in range(10)])
    for key, (token_ids, stop, logprobs) in turns.items():
        same = seen["again"][int(key.partition("/")[0])]
        assert (token_ids.tolist(), stop) == (same[0].tolist(), same[1])
        if not served["odd rows"]:
            assert logprobs.tobytes() == same[2].tobytes()
    tally = served["dribbling"]["tally"]
    assert (tally.num_turns, tally.num_steps > 40) == (10, True), "ranks count alike"


@pytest.mark.parametrize("agent", AGENTS)
def test_odd_rows_are_known_without_an_engine(saw, models, agent):
    """`check` measures layers of the same shapes as the engine's, of which each rank has half."""
    shapes = engine_layer_shapes(Architecture.from_folder(models / agent), tp=2)
    assert (64, 32) in shapes  # of the attention's output: both heads, and the part of a rank
    assert odd_row_counts_of(shapes, torch.float32) == saw[agent, 0]["served"]["odd rows"]


@pytest.mark.parametrize("agent", AGENTS)
def test_conversations_are_the_same_in_any_order(saw, oracles, agent):
    """Their later turns read the earlier ones from the prefix cache, and have the log-probs of the whole text."""
    served = saw[agent, 0]["served"]
    orders = [served[name]["turns"] for name in ("all at once", "one by one", "apart", "with a companion")]
    assert {len(turns) for turns in orders} == {12}
    for turns in orders[1:]:
        for key, (token_ids, _, logprobs) in orders[0].items():
            assert turns[key][0].tolist() == token_ids.tolist(), key
            if served["odd rows"] <= {1}:
                assert turns[key][2].tobytes() == logprobs.tobytes(), key
    assert served["one by one"]["tally"].num_cached_tokens > 50
    assert served["one by one"]["order"] != served["all at once"]["order"]
    for opening, key in zip(served["openings"], ("0", "1"), strict=False):
        head = list(opening)
        for turn in range(3):
            token_ids, _, logprobs = orders[0][f"{key}/{turn}"]
            whole = oracles[f"{agent}-other"].score(head + token_ids.tolist(), TEMPERATURE)
            np.testing.assert_allclose(logprobs, whole[len(head) - 1 :], atol=1e-4, rtol=0)
            head += [*token_ids.tolist(), *SAID]


@pytest.mark.parametrize("agent, rank", RANKS)
def test_aborted_turns_end_with_the_beginning_of_their_answer(saw, agent, rank):
    seen = saw[agent, rank]
    turns = seen["served"]["aborted"]["turns"]
    assert len(turns) == (0 if rank else 41)
    cut = 0
    for place in range(0 if rank else 41):
        token_ids, stop, logprobs = turns[f"{place}/0"]
        whole, ending, _ = seen["again"][place]
        assert token_ids.tolist() == whole[: len(token_ids)].tolist() and len(logprobs) == len(token_ids)
        assert stop is (Stop.CUT if len(token_ids) < len(whole) else ending)
        cut += stop is Stop.CUT
    assert rank or 10 <= cut <= 20


@pytest.mark.parametrize("agent, rank", RANKS)
def test_a_loop_that_dies_is_told_to_its_source_and_ends_on_every_rank(saw, agent, rank):
    served = saw[agent, rank]["served"]
    beyond, dead, inside = (served[name] for name in ("beyond", "dead", "inside"))
    assert beyond["error"] == "ValueError: turn 1/0: token id 131 is none of the model's 131"
    assert served["busy"] == "1 requests still use prefixes that the old weights have computed: abort them"
    if rank:
        told = "RuntimeError: the first rank of this engine has ended its loop: "
        assert dead["error"] == told + "OSError: the player is gone"
        assert inside["error"].startswith(told + "RuntimeError: generate() while the engine serves")
        return
    assert dead["error"] == "OSError: the player is gone" and dead["told"] == "the player is gone"
    assert beyond["told"] in beyond["error"]
    assert inside["error"].startswith("RuntimeError: generate() while the engine serves turns")


@pytest.mark.parametrize("agent, rank", RANKS)
def test_engines_of_one_and_of_two_ranks_draw_the_same_answers(saw, agent, rank):
    """But where rounding decides between two tokens, which is rare: at most one of 41 answers."""
    seen = saw[agent, rank]
    pairs = zip(tokens_of(seen["replica answers"]), tokens_of(seen["answers"]), strict=True)
    assert sum(one != two for one, two in pairs) <= 1


@pytest.mark.parametrize("agent", AGENTS)
def test_unwanted_answers_are_cut_and_each_answer_is_reported_as_it_ends(saw, agent):
    """Both ranks have the beginnings of the whole answers, with their log-probs, once the first of 41 has ended."""
    seen, neighbour = saw[agent, 0], saw[agent, 1]
    ended = [stop is not Stop.CUT for _, stop, _ in seen["cut"]]
    assert len(seen["cut"]) == 41 and 1 <= sum(ended) < 41
    for (token_ids, stop, logprobs), (whole, ending, _) in zip(seen["cut"], seen["answers"], strict=True):
        assert token_ids.tolist() == whole[: len(token_ids)].tolist()
        assert len(logprobs) == len(token_ids)
        assert (len(token_ids) < len(whole)) if stop is Stop.CUT else (stop is ending)
    assert sorted(place for place, _ in seen["told"]) == list(range(41))
    for place, (token_ids, stop, _) in seen["told"]:
        assert (token_ids.tolist(), stop) == (seen["cut"][place][0].tolist(), seen["cut"][place][1])
    assert ended[seen["told"][0][0]], "in the order in which they end"
    assert [answer[0].tolist() for answer in neighbour["cut"]] == [answer[0].tolist() for answer in seen["cut"]]


@pytest.mark.parametrize("agent", AGENTS)
def test_greedy_takes_the_most_likely_token(saw, oracles, agent):
    seen = saw[agent, 0]
    for prompt, (token_ids, _, _) in zip(seen["prompts"], seen["greedy"]):
        table_TV = oracles[f"{agent}-other"].table(prompt + token_ids.tolist())[len(prompt) - 1 : -1]
        chosen_T = table_TV[np.arange(len(token_ids)), token_ids]
        np.testing.assert_allclose(chosen_T, table_TV.max(axis=1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("agent, rank", RANKS)
def test_samples_follow_the_distribution(saw, oracles, agent, rank):
    """Pearson's chi-square of first tokens under the seeds of one prompt's rollouts; fixed seeds, so no flakiness."""
    seen = saw[agent, rank]
    draws = np.asarray(seen["draws"])
    expected_V = np.exp(oracles[agent].table(seen["sequences"][0])[-1]) * len(draws)
    counted_V = np.bincount(draws, minlength=len(expected_V))
    common = expected_V >= 5
    expected = np.append(expected_V[common], expected_V[~common].sum())
    counted = np.append(counted_V[common], counted_V[~common].sum())
    degrees = len(expected) - 1
    # Wilson and Hilferty: the cube root of chi-square / degrees is normal; 4 standard deviations
    limit = degrees * (1 - 2 / (9 * degrees) + 4 * np.sqrt(2 / (9 * degrees))) ** 3
    assert ((counted - expected) ** 2 / expected).sum() < limit


def test_agents_draw_different_noise(saw):
    first, second = (np.asarray(saw["qwen3", rank]["draws"]) for rank in (0, 1))
    assert np.mean(first == second) < 0.2


@pytest.mark.parametrize("agent", AGENTS)
def test_stop_says_why_an_answer_ended(saw, agent):
    stops = set()
    for token_ids, stop, _ in saw[agent, 0]["answers"]:
        stops.add(stop)
        ended = EOS in token_ids
        assert stop == (Stop.EOS if ended else Stop.LENGTH)
        assert not ended or token_ids.tolist().index(EOS) == len(token_ids) - 1, "it keeps the EOS and nothing after"
        assert ended or len(token_ids) == 40
    assert stops == {Stop.EOS, Stop.LENGTH}, "the job sampled both kinds"
    assert len(saw[agent, 0]["just fits"][0]) == 6
    assert saw[agent, 0]["empty"] == []


@pytest.mark.parametrize("agent, rank", RANKS)
def test_the_trainers_process_is_left_as_it_was(saw, agent, rank):
    """Random streams, threads, dtype, gradient mode, the environment of child processes, the default process group."""
    before, after = saw[agent, rank]["process"]
    assert after == before


@pytest.mark.parametrize("agent, rank", RANKS)
def test_an_engine_in_a_thread_answers_alike_and_touches_no_generator(saw, agent, rank):
    """Nor do they reach an answer: jobs/test_answers_ahead.py disturbs all of them."""
    seen = saw[agent, rank]
    assert tokens_of(seen["beside"]) == tokens_of(seen["here"])
    for one, other in zip(seen["beside"], seen["here"], strict=True):
        assert one[2].tolist() == other[2].tolist()
    before, after = seen["process beside"]
    assert after == before


@pytest.mark.parametrize("agent, rank", RANKS)
def test_answers_that_nobody_wants_any_more_are_cut_after_a_step(saw, agent, rank):
    answers = saw[agent, rank]["unwanted"]
    assert all(len(ids) <= 1 for ids, _, _ in answers)
    assert all(stop is Stop.CUT or ids.tolist() == [EOS] for ids, stop, _ in answers)
    assert any(stop is Stop.CUT for _, stop, _ in answers)


def test_shared_memory_has_no_name_that_a_killed_rank_could_leave_behind(saw):
    """The kernel marks a mapped file without a name as deleted. Each rank of an engine of two maps both segments.

    vLLM's build for processors without AVX-512 has no shared memory: its ranks meet through torch.distributed.
    tests/unit/rollout/test_host_process.py has the names go on every processor.
    """
    for rank in range(2):
        segments = saw["qwen3", rank]["shared memory"]
        assert len(segments) >= 2 if saw["qwen3", rank]["has shared memory"] else not segments
        assert all(line.endswith(" (deleted)") for line in segments), segments


@pytest.mark.parametrize("agent, rank", RANKS)
def test_engines_on_several_ranks_unpickle_nothing_and_share_privately(saw, agent, rank):
    """vLLM's queue would listen on sockets under the temporary folder, and over several nodes on TCP ports."""
    assert saw[agent, rank]["queue"] is None
    assert set(saw[agent, rank]["shared memory modes"]) <= {0o600, None}


@pytest.mark.nightly
def test_gradients_still_work_beside_an_engine(saw):
    assert saw["llama", 0]["gradient"].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("agent, rank", RANKS)
def test_sleeping_engines_refuse_and_wake_without_weights(saw, oracles, agent, rank):
    seen = saw[agent, rank]
    for said in (seen["unloaded"], seen["forgot"]):
        assert "needs weights" in said
    for said, verb in zip(seen["asleep"], ("generate", "load", "sleep"), strict=True):
        assert said.startswith(f"RuntimeError: {verb}() needs the engine") and "asleep" in said
    assert "generate() needs the engine awake, it is weights" in seen["no cache"]
    scores, twice = seen["awake"]
    assert_scores(scores, seen["sequences"][rank:], oracles[agent])
    assert "is awake" in twice


@pytest.mark.parametrize("agent, rank", RANKS)
def test_half_a_publish_is_an_error(saw, agent, rank):
    """vLLM itself would keep the old values of what is missing, and only log it."""
    assert "1 missing ['model.layers.1.mlp.down_proj.weight'], 0 unknown" in saw[agent, rank]["lacking"]
    assert "needs weights" in saw[agent, rank]["lacking refuses"]


@pytest.mark.nightly
def test_errors_say_what_to_do(saw):
    seen = saw["llama", 0]
    assert "250 tokens; with max_tokens 7 the engine (max_model_len 256) takes 1 to 249" in seen["too long"]
    assert "256 tokens" in seen["no score"]
    assert "vllm.dtype = 'bfloat16'" in seen["owned"]
    assert "engine_tp (3) must divide the agent's 2 ranks" in seen["indivisible"]
    assert "head_dim 16" in seen["head size"]
    assert "VLLM_ENABLE_V1_MULTIPROCESSING is 1" in seen["environment"]


@pytest.mark.nightly
def test_seeds_and_ends_are_facts_of_the_run(saw):
    seen = saw["llama", 0]
    assert len(seen["seeds"]) == 3 * 20 * 8 * 2, "no two answers share a seed"
    assert all(0 <= seed < 2**63 for seed in seen["seeds"])
    # By hand: half of the little-endian BLAKE2b-64 of five little-endian int64. A resumed run depends on it.
    assert seen["seed"] == 2_908_383_577_397_656_658
