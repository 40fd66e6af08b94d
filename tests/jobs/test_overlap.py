"""Communication while the cells compute changes no gradient, and a cell without samples holds nobody up.

Two cells over gloo, of one rank and of two. A sum of two has one order, whatever the buckets, so gradients are compared
bit by bit; so are the weights after updates, where the clip does not bind, whose norm is summed by the buckets' shards.
"""

import pytest
import torch
import torch.distributed as dist
from actor_cases import full_weights, make_actor, objective, random_samples
from job import run_group
from tiny_models import make_model

from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.config import DataParallelConfig, OptimizerConfig
from hacpo_mega.megatron.train.overlap import finish_gather, start_gather

pytestmark = pytest.mark.nightly

BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 4000}
CHOICES = {
    "plain": DataParallelConfig(),
    "gradients": DataParallelConfig(**BUCKETS),
    "both": DataParallelConfig(**BUCKETS, overlap_param_gather=True),
    "padded": DataParallelConfig(**BUCKETS, overlap_param_gather=True, pad_buckets_for_high_nccl_busbw=True),
}
# Updates of one run, by how many cells have samples: the first one and a later one with an empty cell among others.
CELLS = (1, 2, 2, 1, 2)
ADAM = OptimizerConfig(lr=1e-3, clip_grad=1e9)


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    """By rank, model and choice -> what `learn` saw."""
    root = tmp_path_factory.mktemp("overlap")
    folders = {
        "tied": make_model(root / "tied", family="qwen3", tied=True),
        "untied": make_model(root / "untied", family="llama", tied=False),
    }
    return run_group(2, learn_in_every_way, folders)


def learn_in_every_way(folders):
    return {(name, choice): learn(folders[name], CHOICES[choice]) for name in folders for choice in CHOICES}


def learn(folder, communication):
    """Five updates of some micro-batches, with scores, a diagnosis and a reference between them, as in steps."""
    actor = make_actor(folder, optimizer=ADAM, communication=communication)
    seen, begun = {"gradients": [], "inside backward": [], "gathering": []}, []
    actor.keep_reference()
    for group in actor.model.bucket_groups:
        watch(group, begun)
    for number, cells in enumerate(CELLS):
        drawn = random_samples(6, seed=20 + number)
        mine = [sample for sample in drawn if sample.prompt_index % cells == dist.get_rank()]
        own, other = ([s for s in mine if s.is_self is is_self] for is_self in (True, False))
        seen["products"] = actor.gradient_products([own, other], objective)
        begun.clear()
        actor.learn(mine, objective)
        seen["inside backward"].append(list(begun))
        seen["gathering"].append(any(group.param_gather_handle is not None for group in actor.model.bucket_groups))
        seen["gradients"].append(shards(actor))
        if number % 2:
            seen["scores"] = [score.mean_logprob for score in actor.score(drawn[: 4 * dist.get_rank()])]
    seen["reference"] = actor.reference_token_logprobs(drawn[:2])
    return seen | {"weights": full_weights(actor), "num_buckets": len(actor.model.bucket_groups)}


def watch(group, begun) -> None:
    """Notes of every reduction whether it begins before backward has ended, where `finish_grad_sync` is called."""
    start, finish = group.start_grad_sync, group.finish_grad_sync
    ending = []
    group.start_grad_sync = lambda *args, **kwargs: (begun.append(not ending), start(*args, **kwargs))[1]
    group.finish_grad_sync = lambda *a, **k: (ending.append(1), finish(*a, **k), ending.clear())[1]


def shards(actor) -> dict[str, tuple[int, torch.Tensor]]:
    """By parameter, this rank's part of its reduced gradient, and the number at which it starts."""
    found = {}
    for name, parameter in actor.model.module.named_parameters():
        share = actor.optimizer.share_of(parameter)
        if share is not None:
            found[name] = share.start, parameter.main_grad.flatten()[share.start : share.stop].clone()
    return found


def whole(by_rank, key, update) -> dict[str, torch.Tensor]:
    """The gradient of an update, put together from the shards of all ranks."""
    pieces = {}
    for answers in by_rank:
        for name, piece in answers[key]["gradients"][update].items():
            pieces.setdefault(name, []).append(piece)
    return {
        name: torch.cat([values for _, values in sorted(found, key=lambda p: p[0])]) for name, found in pieces.items()
    }


@pytest.mark.parametrize("choice", ["gradients", "both", "padded"])
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_no_gradient_changes_by_a_bit(by_rank, model, choice):
    for update in range(len(CELLS)):
        plain, other = (whole(by_rank, (model, name), update) for name in ("plain", choice))
        assert plain.keys() == other.keys()
        assert all(torch.equal(plain[name], other[name]) for name in plain)
        assert all(bool(gradient.any()) for gradient in plain.values())


@pytest.mark.parametrize("choice", ["gradients", "both", "padded"])
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_neither_does_what_is_scored_or_published(by_rank, model, choice):
    for answers in by_rank:
        plain, other = answers[model, "plain"], answers[model, choice]
        assert plain["scores"] == other["scores"]
        assert all((a == b).all() for a, b in zip(plain["reference"], other["reference"], strict=True))
        assert all(torch.equal(plain["weights"][name], other["weights"][name]) for name in plain["weights"])


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_reductions_begin_inside_backward_where_every_cell_has_one(by_rank, model):
    """Megatron sees in the first backward of that kind what a bucket waits for, and begins inside later ones."""
    for answers in by_rank:
        seen = answers[model, "gradients"]
        assert seen["num_buckets"] > 3
        assert len(answers[model, "plain"]["inside backward"][1]) == answers[model, "plain"]["num_buckets"] < 3
        inside = [all(begun) if any(begun) else False for begun in seen["inside backward"]]
        assert inside == [False, True, True, False, True]
        assert [len(begun) for begun in seen["inside backward"]] == [seen["num_buckets"]] * len(CELLS)


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_weights_are_still_gathered_when_learn_returns(by_rank, model):
    """In every update, of every cell, also of one that had no samples."""
    for answers in by_rank:
        assert answers[model, "both"]["gathering"] == [True] * len(CELLS)
        assert answers[model, "gradients"]["gathering"] == [False] * len(CELLS)


def test_gathers_of_many_buckets_at_once_leave_the_memory_whole(tmp_path):
    """Hundreds of them: with gloo's coalesced gather about every second job died by as many, its heap torn."""
    folder = make_model(tmp_path / "model", family="qwen3", tied=True)
    assert run_group(2, gather_often, folder) == [9, 9]


def gather_often(folder) -> int:
    buckets = DataParallelConfig(overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=1000)
    actor = make_actor(folder, communication=buckets)
    before = full_weights(actor)
    for _ in range(600):
        start_gather(actor.model)
        finish_gather(actor.model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_weights(actor).items())
    return len(actor.model.bucket_groups)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    """Two cells of two ranks each: of every rank, layout and choice -> what `learn_small` saw."""
    folder = make_model(tmp_path_factory.mktemp("overlap"), family="qwen3", tied=True)
    return run_group(4, learn_in_cells_of_two, folder)


def learn_in_cells_of_two(folder):
    layouts = [(1, 2), (2, 1)]
    return {(tp, pp, name): learn_small(folder, tp, pp, name) for tp, pp in layouts for name in ("plain", "both")}


def learn_small(folder, tp, pp, choice):
    """Updates of both cells, of the first alone, and of both; then both kinds of actor take up the state."""
    actor = make_actor(folder, tp=tp, pp=pp, optimizer=ADAM, communication=CHOICES[choice])
    seen = []
    for number, cells in enumerate((2, 1, 2)):
        drawn = random_samples(6, seed=30 + number)
        mine = [sample for sample in drawn if sample.prompt_index % cells == dist.get_rank() // 2]
        loss = actor.learn(mine, objective).loss
        seen.append((loss, [score.mean_logprob for score in actor.score(drawn[:3])]))
    state, weights, num_buckets = folder / f"{tp}-{pp}-{choice}", full_weights(actor), len(actor.model.bucket_groups)
    state.mkdir(exist_ok=True)
    counts, write = actor.save(state)
    write()
    other = make_actor(folder, tp=tp, pp=pp, communication=CHOICES["both" if choice == "plain" else "plain"])
    other.load(state, **counts)
    taken_up = full_weights(other)
    assert all(torch.equal(taken_up[name], weights[name]) for name in weights)
    actor.learn(mine, objective)
    actor.load(state, **counts)  # while the weights of that update may still be gathered
    assert all(torch.equal(tensor, weights[name]) for name, tensor in full_weights(actor).items())
    return seen, weights, num_buckets


@pytest.mark.parametrize("tp, pp", [(1, 2), (2, 1)])
def test_cells_of_two_ranks_learn_the_same(of_four, tp, pp):
    """With a head that two stages share, and a pipeline of which Megatron gives the first stage alone buckets."""
    for rank, answers in enumerate(of_four):
        seen, weights, num_buckets = answers[tp, pp, "both"]
        plain, plain_weights, _ = answers[tp, pp, "plain"]
        assert seen == plain
        assert all(torch.equal(weights[name], plain_weights[name]) for name in plain_weights)
        assert (num_buckets > 3) is (tp == 2 or rank % 2 == 0)


@pytest.mark.parametrize("field", ["use_distributed_optimizer", "grad_reduce_in_fp32", "average_in_collective"])
def test_what_the_law_of_gradients_decides_is_refused(field):
    with pytest.raises(ValueError, match=rf"{field}\n.*not permitted"):
        DataParallelConfig(**{field: False})


def nodes(rank_map: RankMap, agent: int, per_node: int) -> list[bytes]:
    """The nodes of the leaders of an agent's cells, where ranks fill nodes in order."""
    size, cells = rank_map.agents[agent].cell_size, rank_map.lanes * rank_map.agents[agent].cells_per_lane
    return [b"node%d" % ((rank_map.first_ranks[agent] + cell * size) // per_node) for cell in range(cells)]


@pytest.mark.parametrize(
    "lanes, tp, on", [(4, 2, False), (4, 4, True), (1, 16, False), (2, 8, True), (2, 4, False), (1, 1, False)]
)
def test_overlap_is_on_where_cells_are_on_several_nodes(lanes, tp, on):
    rank_map = RankMap(lanes, (AgentShape("a", tp=tp), AgentShape("b", tp=tp)))
    for agent in range(2):
        found = DataParallelConfig().by_nodes(nodes(rank_map, agent, per_node=8))
        assert (found.overlap_grad_reduce, found.overlap_param_gather) == (on, on)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"overlap_grad_reduce": False}, (False, False)),
        ({"overlap_param_gather": False}, (True, False)),
        ({"overlap_grad_reduce": True}, (True, False)),
        ({"overlap_grad_reduce": True, "overlap_param_gather": True}, (True, True)),
    ],
)
def test_overlap_that_is_given_wins(given, expected):
    found = DataParallelConfig(**given).by_nodes([b"a", b"b"])
    assert (found.overlap_grad_reduce, found.overlap_param_gather) == expected
    assert found == found.by_nodes([b"a"])


def test_a_bucket_size_without_buckets_is_refused():
    with pytest.raises(ValueError, match="bucket_size: without overlap_grad_reduce there is one bucket; set it too"):
        DataParallelConfig(bucket_size=1000)
    with pytest.raises(ValueError, match="overlap_param_gather: without overlap_grad_reduce"):
        DataParallelConfig(overlap_param_gather=True)
