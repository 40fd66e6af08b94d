"""Answers that cross tokenizers of three designs: 1,000 real solutions, every ordered pair (docs/measurements/data.md).

A solution is written in the source's tokens, decoded, and encoded by the learner as the continuation of a prompt.
"""

import functools
import itertools
import math

import pytest
import torch
from repository import SHARED
from transformers import LlamaConfig, LlamaForCausalLM

from hacpo_mega.data.datasets import read_dataset
from hacpo_mega.samples.tokenizers import TextCodec, load_tokenizer

NAMES = ("gpt-2", "phi-3", "deepseek-llm")
MISSING = [name for name in ("tokenizers", "data") if not (SHARED / name).is_dir()]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the real {' and '.join(MISSING)} are not in {SHARED}")


@pytest.fixture(scope="module")
def codecs():
    return {name: TextCodec(load_tokenizer(SHARED / "tokenizers" / name)) for name in NAMES}


@pytest.fixture(scope="module")
def solutions():
    problems = read_dataset(SHARED / "data/math/MATH_original_test.tar.gz").problems
    return [problem.solution for problem in problems[:: len(problems) // 1000][:1000]]


@pytest.mark.nightly
def test_real_solutions_survive_and_their_lengths_differ_by_a_few_percent(codecs, solutions):
    """Sums over all solutions: every text survives, and no pair is more than 5 % apart in tokens."""
    assert len(solutions) == 1000

    @functools.cache
    def written(name: str, text: str) -> tuple[int, str]:
        """The tokens of a text, and what is read of them; a text that survives is the same to every learner."""
        ids = codecs[name].encode_answer(text, ended=True)
        return len(ids), codecs[name].decode_answer(ids)

    for source, learner in itertools.permutations(NAMES, 2):
        changed, num_source, num_learner = 0, 0, 0
        for text in solutions:
            source_tokens, told = written(source, text)
            learner_tokens, read = written(learner, told)
            changed += read != text
            num_source += source_tokens
            num_learner += learner_tokens
        print(f"| {source} | {learner} | {1 - changed / 1000:.1%} | {num_learner / num_source:.3f} |")
        assert changed == 0, (source, learner)
        assert 0.95 < num_learner / num_source < 1.05, (source, learner)


@pytest.mark.nightly
def test_the_ratio_of_untrained_models_is_that_of_their_vocabularies(codecs, solutions):
    """A model near its start gives every token log(1 / V), so between tokenizers, each side averaged over its own
    tokens, the cross ratio is V source / V learner: the band below 1 fits only once both models know the text.
    """
    torch.manual_seed(0)
    means = {}
    for name, codec in codecs.items():
        config = LlamaConfig(
            vocab_size=len(codec.tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=4096, initializer_range=0.02,
        )  # fmt: skip
        model = LlamaForCausalLM(config).eval()
        sums = []
        for text in solutions[:20]:
            ids = torch.tensor([[codec.eos_id, *codec.encode_answer(text[:400], ended=True)]])
            with torch.no_grad():
                logprobs = model(ids).logits[0, :-1].log_softmax(-1)
            sums.append(logprobs.gather(1, ids[0, 1:, None]).mean().item())
        means[name] = sum(sums) / len(sums)
        print(f"| {name} | {len(codec.tokenizer)} | {means[name]:.3f} | {-math.log(len(codec.tokenizer)):.3f} |")
        assert means[name] == pytest.approx(-math.log(len(codec.tokenizer)), abs=0.02)
    assert math.exp(means["deepseek-llm"] - means["phi-3"]) == pytest.approx(32064 / 102403, rel=0.03)


@pytest.mark.nightly
def test_every_answer_would_get_a_marker_if_it_were_encoded_by_itself(codecs, solutions):
    """The anchor prevents this: encoded alone, no solution keeps its first token under a SentencePiece design."""
    phi = codecs["phi-3"]
    for text in solutions[:100]:
        alone = phi.tokenizer(text, add_special_tokens=False).input_ids
        behind = phi.encode_answer(text, ended=False)
        assert phi.tokenizer.convert_ids_to_tokens(alone[0]).startswith("▁")
        assert not phi.tokenizer.convert_ids_to_tokens(behind[0]).startswith("▁") or text.startswith(" ")
        assert phi.tokenizer.decode(phi.encode_prompt("Q:") + behind) == "Q:" + text
