"""The fourteen things users of published fused-loss kernels complain about, each as a test of ours.

Numbers 9 to 14, which compare runs with runs, are in test_kernel_repeats.py.

The numbers and threads name who was bitten. Tests that need real hardware (offsets past 2^31 elements, memory, no host
synchronisation) are in tests/gpu/.

Equal bits are asked for where our code decides them. On a CPU a matrix product is the host's BLAS, whose bits depend
on the processor and on a row's place: there the same is asked of heads of whole numbers, whose logits are exact.
"""

import ast
import importlib
import weakref
from pathlib import Path

import hacpo_kernels
import pytest
import torch
from hacpo_kernels import backends, linear_logprob, objective_stats, packed_objective, reference
from kernel_cases import BACKENDS, DEVICE, UNIT, Head, assert_within, exact, make_head, relative_error
from objective_cases import BOUNDS, make_batch, oracle

# numpy warns of lanes that Triton masks away afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
linear_logprob_triton = importlib.import_module("hacpo_kernels.linear_logprob")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
# Seventy thousand rows take Triton's interpreter a minute, which knows no limit of a grid: compiled kernels alone.
each_backend_in_large = pytest.mark.parametrize("backend", BACKENDS if DEVICE == "cuda" else ["reference"])


@each_backend
def test_01_padded_vocabulary_stays_out_of_the_softmax(backend):
    """verl #2899: all true logits near -50, so that a single pad column of 0 would take all probability."""
    for num_columns in (255, 256, 257, 1023, 1025):  # around tile and split borders
        head = make_head(20, 16, num_columns, pads=7)
        head.hidden[:, 0], head.weight[:num_columns, 0] = 1.0, -50.0
        want = exact(head, torch.ones(20))
        hidden, weight = head.leaves()
        logprob = linear_logprob(hidden, weight, head.target, vocab_size=num_columns, backend=backend)
        logprob.sum().backward()
        assert_within(logprob, want.logprob, want.logprob_bound)
        assert (logprob <= 0).all()
        assert (weight.grad[num_columns:] == 0).all()
        assert hidden.grad.isfinite().all()


@each_backend
@pytest.mark.parametrize("offset", (-1e4, -200.0, 200.0, 1e4))
def test_02_offsets_and_masked_shards_keep_it_finite(offset, backend):
    """SkyRL #2141, #2259: a running maximum that starts at 0 gives log 0 where all logits are far below it."""
    plain = make_head(20, 16, 600)
    hidden = torch.cat([plain.hidden, torch.ones(20, 1, device=DEVICE)], dim=1)
    weight = torch.cat([plain.weight, torch.full((600, 1), offset, device=DEVICE)], dim=1)
    want = exact(Head(hidden, weight, plain.target, 600), torch.ones(20))
    shifted = linear_logprob(hidden, weight, plain.target, backend=backend)
    assert_within(shifted, want.logprob, want.logprob_bound)
    assert want.logprob_bound.max() < 0.05, "the bound grows with the offset, but must still say something"


@each_backend
def test_02_a_shard_without_any_probability(backend):
    """Columns masked to -inf by their weights: no NaN from exp(-inf + inf)."""
    head = make_head(20, 16, 600)
    head.hidden[:, 0], head.weight[300:, 0] = 1.0, -torch.inf
    head.target.clamp_(max=299)
    want = exact(Head(head.hidden, head.weight[:300], head.target, 300), torch.ones(20))
    logprob = linear_logprob(head.hidden, head.weight, head.target, backend=backend)
    assert_within(logprob, want.logprob, want.logprob_bound)
    masked = backends.choose_backend(backend, head.hidden, (torch.float32,)).logit_stats(
        head.hidden, head.weight[300:], torch.full_like(head.target, -1), reference.Curve(1.0)
    )
    assert (masked.max_T == -torch.inf).all()
    assert (masked.sum_T == 0).all()


@each_backend
def test_03_labels_of_other_shards_never_hit_a_pad_column(backend):
    """ml-cross-entropy #59. A shard of 100 ids from 200 on, 93 of them real: labels on both edges and beyond them.

    The shard alone sees label 199 and 293 as absent (target -inf) although 293 is a row that exists, as padding.
    The same over real ranks: test_linear_logprob.test_sharded_vocabulary_equals_one_rank.
    """
    head = make_head(6, 16, 93, pads=7)
    head.target[:] = torch.tensor([199, 200, 292, 293, 299, -100])
    module = backends.choose_backend(backend, head.hidden, (torch.float32,))
    column = head.target - 200
    column = column.masked_fill((column < 0) | (column >= 93), -1)
    stats = module.logit_stats(head.hidden, head.weight[:93], column, reference.Curve(1.0))
    logits = head.hidden.double() @ head.weight.double().T
    expected = [-torch.inf, logits[1, 0].item(), logits[2, 92].item(), -torch.inf, -torch.inf, -torch.inf]
    # 16 products of float32, added up in any order
    allowed = 17 * UNIT[torch.float32] * (head.hidden.double().abs() @ head.weight[:93].double().abs().T).max().item()
    assert stats.target_T.tolist() == pytest.approx(expected, abs=allowed)


@each_backend
def test_04_gradient_error_does_not_grow_with_the_number_of_chunks(backend, monkeypatch):
    """Liger #1391: bf16 sums over 1,024 chunks are 7 times worse than over one. Ours are float32.

    The logits are exact, so every chunking has the same logit gradients: what differs is how they are added up, and a
    float32 sum may be off by as many roundings as it has terms. A bf16 sum is off by 256 times as much."""
    head = make_head(512, 32, 160, dtype=torch.bfloat16, whole=True)
    coefficient = torch.rand(512) + 0.5
    want = exact(head, coefficient)
    weight_grads = []
    for num_chunks in (1, 4, 64):
        module = backends.choose_backend(backend, head.hidden, (torch.bfloat16,))
        fixed = {**vars(module), "chunk_rows": lambda columns, n=num_chunks: 512 // n}
        monkeypatch.setattr(backends, backend.upper(), backends.Backend(**fixed))
        hidden, weight = head.leaves()
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        logprob = linear_logprob(hidden, weight, head.target, fuse_main_grad=True, backend=backend)
        (logprob * coefficient.to(DEVICE)).sum().backward()
        assert_within(hidden.grad, want.hidden_grad, want.hidden_bound)
        assert_within(weight.main_grad, want.weight_grad, want.weight_bound)
        weight_grads.append(weight.main_grad)
    prob_TV = (head.hidden.cpu().double() @ head.weight.cpu().double().T).softmax(dim=1)
    hit_TV = torch.nn.functional.one_hot(head.target.cpu(), 160)
    sizes_VH = ((hit_TV - prob_TV).abs() * coefficient[:, None]).T @ head.hidden.cpu().double().abs()
    for several in weight_grads[1:]:
        # 512 roundings in either sum; the logit gradients' own rounding to bf16 makes each term up to 2^-7 larger
        assert_within(several, weight_grads[0], 2 * 512 * UNIT[torch.float32] * (1 + 2**-7) * sizes_VH)


def test_04_one_chunk_of_the_logits_gradient_is_alive_at_a_time(monkeypatch):
    """On an H200 a step at T 32,768 needed 5.2 GB where one chunk is 2.5: the last chunk lived on beside the next."""
    made = []

    def logit_gradient(*arguments):
        assert all(chunk() is None for chunk in made)
        gradient = backends.reference.logit_gradient(*arguments)
        made.append(weakref.ref(gradient))
        return gradient

    fixed = {**vars(backends.REFERENCE), "logit_gradient": logit_gradient, "chunk_rows": lambda columns: 8}
    monkeypatch.setattr(backends, "REFERENCE", backends.Backend(**fixed))
    head = make_head(32, 8, 40)
    hidden, weight = head.leaves()
    linear_logprob(hidden, weight, head.target, backend="reference").sum().backward()
    assert len(made) == 4


@each_backend
def test_05_coefficients_per_token_of_any_size_and_sign(backend):
    """Liger #968, TransformerEngine #2139: kernels that were right only for a gradient of 1."""
    head = make_head(120, 16, 300)
    coefficient = torch.randn(120).sign() * torch.logspace(-6, 3, 120)
    coefficient[::5] = 0.0
    want = exact(head, coefficient)
    hidden, weight = head.leaves()
    logprob = linear_logprob(hidden, weight, head.target, backend=backend)
    (logprob * coefficient.to(DEVICE)).sum().backward()
    # Row by row: the bound of a row has the size of its coefficient, and is 0 where that is 0.
    assert_within(hidden.grad, want.hidden_grad, want.hidden_bound)
    assert_within(weight.grad, want.weight_grad, want.weight_bound)
    kept = coefficient != 0
    assert (want.hidden_bound[kept].norm(dim=1) < 1e-2 * want.hidden_grad[kept].norm(dim=1)).all()
    without = exact(head, kept.float())
    assert relative_error(weight.grad, without.weight_grad) > 0.1, "dropping the coefficient would go unseen"


@each_backend
def test_06_rows_further_apart_than_2_to_31_elements(backend):
    """Liger #803. Two rows of hidden 2^31 elements apart (memory never touched in between is never there)."""
    if DEVICE == "cuda":
        pytest.skip("real sizes are in tests/gpu")
    head = make_head(2, 16, 40, dtype=torch.bfloat16, whole=True)
    stride = 2**31 + 64
    far = torch.empty(stride + 16, dtype=torch.bfloat16).as_strided((2, 16), (stride, 1))
    far.copy_(head.hidden)
    got = linear_logprob(far, head.weight, head.target, backend=backend)
    assert torch.equal(got, linear_logprob(head.hidden, head.weight, head.target, backend=backend))


def _unsafe_products(function: ast.FunctionDef) -> tuple[list[str], int]:
    """(products of a run-time size that no int64 takes part in, number of products looked at)."""
    sizes = {"num_rows", "num_tokens", "num_sequences", "hidden_stride", "weight_stride", "out_stride"}
    assigned = (node for node in ast.walk(function) if isinstance(node, ast.Assign))
    wide = {ast.unparse(node.targets[0]) for node in assigned if "int64" in ast.unparse(node.value)}
    unsafe, seen = [], 0
    for product in ast.walk(function):
        if isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult):
            # A number of tiles is small: T / 128 times V / 256 stays below 2^31 when T * V is far beyond it.
            sides = [side for side in (product.left, product.right) if not ast.unparse(side).startswith("tl.cdiv")]
            names = {node.id for side in sides for node in ast.walk(side) if isinstance(node, ast.Name)}
            seen += bool(names & sizes)
            if names & sizes and not names & wide and "int64" not in ast.unparse(product):
                unsafe.append(f"{function.name}: {ast.unparse(product)}")
    return unsafe, seen


def test_06_products_of_sizes_are_taken_in_int64():
    """Static, since T * V > 2^31 needs a GPU: a size of the batch is only ever multiplied with something int64."""
    seen = 0
    for module in ("linear_logprob", "sequence_objective"):
        tree = ast.parse((Path(hacpo_kernels.__file__).parent / f"{module}.py").read_text())
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list):
            unsafe, count = _unsafe_products(function)
            assert not unsafe
            seen += count
    assert seen >= 2
    broken = ast.parse("def f(num_rows, row):\n    return row * num_rows").body[0]
    assert _unsafe_products(broken) == (["f: row * num_rows"], 1)


def test_07_grids_have_one_dimension():
    """The only one that holds more than 65,535 programs, of which the interpreter knows nothing."""
    grids = []
    for module in ("linear_logprob", "sequence_objective"):
        tree = ast.parse((Path(hacpo_kernels.__file__).parent / f"{module}.py").read_text())
        launched = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        grids += [
            func.slice for func in launched if isinstance(func, ast.Subscript) and "kernel" in ast.unparse(func.value)
        ]
    assert len(grids) >= 4 and all(len(grid.elts) == 1 for grid in grids)


@each_backend_in_large
def test_07_more_rows_than_a_grid_dimension(backend):
    """Liger #1294: 65,536 rows. Every row is one of two known ones."""
    head = make_head(2, 8, 20)
    index = torch.arange(65_537 + 128, device=DEVICE) % 2
    hidden, weight = head.hidden[index].requires_grad_(), head.weight.clone().requires_grad_()
    logprob = linear_logprob(hidden, weight, head.target[index], backend=backend)
    logprob.sum().backward()
    want = exact(head, torch.ones(2))
    index = index.cpu()
    assert_within(logprob, want.logprob[index], want.logprob_bound[index])
    assert_within(hidden.grad, want.hidden_grad[index], want.hidden_bound[index])


@each_backend_in_large
def test_07_seventy_thousand_sequences(backend):
    lengths = [1 + (b % 3) for b in range(70_000)]
    tokens, source, advantage, is_self, cu_seqlens = make_batch(lengths)
    arguments = (source, advantage, is_self)
    loss, coefficient, terms = packed_objective(
        tokens, cu_seqlens, *arguments, update_index=0, bounds=BOUNDS, backend=backend
    )
    tail = slice(-300, None)
    start = sum(lengths[:-300])
    want = oracle(tokens[start:], lengths[tail], *(x[tail] for x in arguments), 0, BOUNDS)
    assert_within(loss[tail], want.loss, want.relative * want.loss.abs())
    assert_within(coefficient[tail], want.coefficient, want.relative * want.coefficient.abs())
    stats = objective_stats(terms)
    assert stats.ratio_self[1] + stats.ratio_cross[1] == 70_000


def test_08_chunks_are_never_tiny():
    """pytorch #124480: 64 chunks cost 1.5 times as much as 4. Real vocabularies get thousands of rows per chunk, on
    a GPU at most 2.5 GB of them; the speed itself is measured in tests/gpu and kernels/bench."""
    for num_columns in (151_936, 151_936 // 8, 128_256, 262_144):
        rows = linear_logprob_triton.chunk_rows(num_columns)
        assert 4096 <= rows <= 8192
        assert rows * num_columns * 2 <= 2.5e9
        assert rows % 128 == 0
