"""The order of prompts: a step's depend on (seed, step) alone, lanes share them out, epochs and skills stay whole."""

import hashlib
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hacpo_mega.config.tables.agents import SkillShare
from hacpo_mega.data.prompts import PromptSampler, rows_of_examples
from hacpo_mega.data.reading.files import PromptRow, content_id
from hacpo_mega.data.tasks import SKILLS, WarmStartStream, training_examples


def rows(num, skill=""):
    return [PromptRow(content_id(f"{skill}{i}"), f"{skill}{i}", str(i), skill) for i in range(num)]


@given(
    num_rows=st.integers(1, 40),
    lanes=st.integers(1, 4),
    share=st.integers(1, 5),
    updates=st.integers(1, 3),
    seed=st.integers(0, 2**40),
    step=st.integers(0, 50),
)
@settings(max_examples=60)
def test_lanes_partition_every_update_and_every_epoch_has_each_prompt_once(num_rows, lanes, share, updates, seed, step):
    per_update = lanes * share
    per_step = updates * per_update
    if num_rows < per_step:
        with pytest.raises(ValueError, match="there are only"):
            PromptSampler(rows(num_rows), seed, per_step, per_update)
        return
    sampler = PromptSampler(rows(num_rows), seed, per_step, per_update)
    whole = sampler.at(step)
    fresh = PromptSampler(rows(num_rows), seed, per_step, per_update)
    of_lanes = [fresh.at(step, lane, lanes) for lane in range(lanes)]
    for update in range(updates):
        mine = slice(update * share, (update + 1) * share)
        together = sum((prompts[mine] for prompts in of_lanes), ())
        assert together == whole[update * per_update : (update + 1) * per_update], "lanes change what shares an update"
    assert [p.index for p in whole] == list(range(per_step))
    seen = Counter(p.text for s in range(num_rows) for p in sampler.at(s))  # num_rows steps are per_step whole epochs
    assert set(seen.values()) == {per_step}
    assert len(seen) == num_rows
    assert len({p.text for p in whole}) == per_step, "a step holds a prompt twice"
    stream = [p.text for s in range(num_rows) for p in PromptSampler(rows(num_rows), seed, per_step, per_update).at(s)]
    assert stream == [p.text for s in range(num_rows) for p in sampler.at(s)], "what was asked before changes a step"
    epochs = [stream[i : i + num_rows] for i in range(0, len(stream), num_rows)]
    assert all(len(set(epoch)) == num_rows for epoch in epochs)


def test_an_epoch_boundary_only_postpones_rows_that_its_step_already_has():
    """Against the permutations themselves, laid end to end: by hand, where 25 rows go through steps of 8."""
    sampler = PromptSampler(rows(25), seed=3, prompts_per_step=8, prompts_per_update=8)
    stream = [int(p.text) for step in range(100) for p in sampler.at(step)]
    expected = []
    for epoch in range(32):
        bits = np.random.PCG64(np.random.SeedSequence((3, 2, 0, epoch)))
        order = [int(i) for i in np.argsort(bits.random_raw(25), kind="stable")]
        has = expected[len(expected) // 8 * 8 :]
        first = [row for row in order if row not in has][: -len(has) % 8]
        expected += first + [row for row in order if row not in first]
    assert stream == expected
    assert {len(set(stream[i : i + 8])) for i in range(0, 800, 8)} == {8}


def test_the_quickstart_s_prompts_are_those_of_before_seams_were_looked_at():
    """SHA-256 of its 40 steps of 64 prompts, of which the smallest skill begins its second epoch in the 36th."""
    examples = [example for skill in ("add", "sub", "mul", "srt") for example in SKILLS[skill]()]
    trained_then = [e for e in examples if hashlib.sha256(e.prompt.encode()).digest()[0] % 5]
    pool = rows_of_examples(trained_then)
    sampler = PromptSampler(pool, seed=7, prompts_per_step=64, prompts_per_update=16, balance_skills=True)
    text = "\n".join(p.text for step in range(40) for p in sampler.at(step))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "cf9e4b016856b087f15bf8827a260a9eea1e748ad82562f7c1e383022017f7be"
    )


def test_resuming_at_an_epoch_boundary_equals_not_stopping():
    """10 rows, 4 a step: step 2 straddles the first boundary, and step 5 starts an epoch exactly."""
    whole = PromptSampler(rows(10), seed=1, prompts_per_step=4, prompts_per_update=2)
    stream = [p.text for step in range(10) for p in whole.at(step)]
    for resumed_at in (2, 3, 5):
        resumed = PromptSampler(rows(10), seed=1, prompts_per_step=4, prompts_per_update=2)
        assert [p.text for s in range(resumed_at, 10) for p in resumed.at(s)] == stream[4 * resumed_at :]
    assert sorted(stream[:10]) == sorted(stream[10:20])
    assert stream[:10] != stream[10:20]


def test_skills_are_balanced_in_every_step_and_lane():
    pool = [row for skill in ("add", "sub", "mul", "srt") for row in rows_of_examples(training_examples(skill))]
    sampler = PromptSampler(pool, seed=1, prompts_per_step=64, prompts_per_update=16, balance_skills=True)
    for step in (0, 1, 999):
        assert Counter(p.skill for p in sampler.at(step)) == {"add": 16, "sub": 16, "mul": 16, "srt": 16}
        assert set(Counter(p.skill for p in sampler.at(step, lane=1, num_lanes=4)).values()) == {4}
    mul = [p.text for step in range(27) for p in sampler.at(step) if p.skill == "mul"]
    assert len(set(mul[:420])) == 420  # the smallest skill goes through its own epoch


@pytest.mark.nightly
def test_another_process_draws_the_same_prompts():
    code = (
        "from hacpo_mega.data.prompts import *; from hacpo_mega.data.tasks import training_examples; "
        "rows = rows_of_examples(training_examples('mul')); "
        "print([p.text for p in PromptSampler(rows, 11, 8, 4).at(75)])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "5"}, capture_output=True, text=True, check=True
    )
    here = PromptSampler(rows_of_examples(training_examples("mul")), 11, 8, 4).at(75)
    assert run.stdout.strip() == str([p.text for p in here])


def test_a_run_with_its_warm_starts_seed_begins_with_other_prompts():
    """One skill, 320 taught examples of 5,992: by chance 3 or 4 of the first 64 prompts are among them, never most."""
    taught = {
        example.prompt
        for example in WarmStartStream({"sum": SkillShare(share=1.0, num_examples=320)}, 64, seed=7).examples[0]
    }
    first = PromptSampler(rows_of_examples(training_examples("sum")), 7, 64, 16).at(0)
    assert len(taught) == 320
    assert sum(prompt.text in taught for prompt in first) < 16


def test_impossible_steps_say_what_would_work():
    with pytest.raises(AssertionError):
        PromptSampler(rows(20), 1, 10, 10).at(0, 0, 4)
    with pytest.raises(AssertionError):
        PromptSampler(rows(20, "a") + rows(20, "b"), 1, 7, 7, balance_skills=True)
    with pytest.raises(
        ValueError, match=r"takes 10 different prompts of each of 2 skills, but there are only 9 of 'b'\. Nearest: 18$"
    ):
        PromptSampler(rows(20, "a") + rows(9, "b"), 1, 20, 20, balance_skills=True)
    with pytest.raises(ValueError, match=r"takes 4 different prompts, but there are only 0\."):
        PromptSampler([], 1, 4, 4)
