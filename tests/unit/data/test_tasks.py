"""The arithmetic task against the specification's own examples, an evaluator of the working, and exact pool sizes."""

import itertools
import re
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repository import ROOT

from hacpo_mega.config import load_config
from hacpo_mega.config.tables.agents import SkillShare
from hacpo_mega.data.tasks import (
    SKILLS,
    WarmStartStream,
    addition,
    chain,
    column_sum,
    content_of,
    evaluation_examples,
    examples_for_test,
    multiplication,
    prompt_set,
    sorting,
    subtraction,
    totals,
    training_examples,
)


@pytest.mark.parametrize(
    "example, prompt, answer",
    [
        (addition(47, 85), "47+85=", "7+5=12,4+8+1=13;132"),
        (addition(41, 22), "41+22=", "1+2=3,4+2=6;63"),
        (subtraction(83, 47), "83-47=", "13-7=6,7-4=3;36"),
        (subtraction(87, 43), "87-43=", "7-3=4,8-4=4;44"),
        (subtraction(50, 50), "50-50=", "0-0=0,5-5=0;0"),
        (multiplication(47, 6), "47*6=", "7*6=42,4*6+4=28;282"),
        (multiplication(41, 2), "41*2=", "1*2=2,4*2=8;82"),
        (sorting("5281"), "s5281=", "1,2,5,8;1258"),
        (sorting("0900"), "s0900=", "0,0,0,9;0009"),
        (column_sum(47, 85, 36, 12), "47+85+36+12=", "7+5=12,12+6=18,18+2=20,4+8+2=14,14+3=17,17+1=18;180"),
        (column_sum(11, 20, 33, 42), "11+20+33+42=", "1+0=1,1+3=4,4+2=6,1+2=3,3+3=6,6+4=10;106"),
        (column_sum(99, 99, 99, 99), "99+99+99+99=", "9+9=18,18+9=27,27+9=36,9+9+3=21,21+9=30,30+9=39;396"),
    ],
)
def test_gold_answers_of_the_specification(example, prompt, answer):
    assert (example.prompt, example.answer) == (prompt, answer)


@pytest.mark.nightly
def test_every_line_of_every_working_is_true():
    """Each `x op y = z` of the working and the result against Python's own arithmetic."""
    for skill in ("add", "sub", "mul", "sum", "chain"):
        for example in SKILLS[skill]():
            for step in example.working.split(","):
                left, right = step.split("=")
                assert eval(left) == int(right), example
            assert eval(example.prompt[:-1]) == int(example.result), example


def test_a_carry_is_written_exactly_when_there_is_one():
    for example in SKILLS["add"]():
        a, b = map(int, re.findall(r"\d+", example.prompt))
        assert ("+1=" in example.working.split(",")[1]) == (a % 10 + b % 10 >= 10 or str(b // 10) == "1"), example


def test_the_working_of_a_sum_adds_every_digit_once_and_carries_totals():
    """Read back from the text alone: the addends of each column are the terms' digits, and each step starts with the
    total before it; the first step of the tens adds what the units carry."""
    for example in SKILLS["sum"]():
        terms = [int(term) for term in example.prompt[:-1].split("+")]
        lefts, totals = zip(*(step.split("=") for step in example.working.split(",")))
        assert len(terms) == 4 and len(lefts) == 6, example
        carry = int(totals[2]) // 10
        tens_start = [str(terms[0] // 10), str(terms[1] // 10)] + [str(carry)] * (carry > 0)
        assert lefts[0].split("+") == [str(terms[0] % 10), str(terms[1] % 10)], example
        assert lefts[3].split("+") == tens_start, example
        for here in (1, 2, 4, 5):
            digit = str(terms[2 + (here - 1) % 3])[here < 3]
            assert lefts[here].split("+") == [totals[here - 1], digit], example
        assert example.result == totals[5] + totals[2][-1], example


def test_the_halves_of_a_chain_are_its_working_in_two_turns():
    assert chain(47, 35, 21, "first").answer == "7+5=12,4+3+1=8;82-21"
    second = chain(47, 35, 21, "second")
    assert (second.prompt, second.partner_answer, second.answer) == (
        "47+35-21=",
        "7+5=12,4+3+1=8;82-21",
        "2-1=1,8-2=6;61",
    )
    for example in SKILLS["chain"]():
        first, rest = (chain(*map(int, re.findall(r"\d+", example.prompt)), half) for half in ("first", "second"))
        assert eval(first.result) == int(example.result) == int(rest.result)
        assert f"{first.working},{rest.working}" == example.working and rest.partner_answer == first.answer


def test_totals_are_true_sums_in_the_order_that_is_asked_for():
    assert totals(column_sum(47, 85, 36, 12), [0.9, 0.3, 0.1, 0.5]).answer == "36+85=121,121+12=133,133+47=180;180"
    assert totals(chain(47, 35, 21), [0.9, 0.2, 0.1]).answer == "35+47=82,82-21=61;61", "what is subtracted comes last"
    answers = {}
    for update in range(20):
        for example in WarmStartStream({"sum": SkillShare(share=1.0, num_examples=3, totals=0.75)}, 64, seed=3).at(
            update
        ):
            answers.setdefault(example.prompt, []).append(example.answer)
            working, result = example.answer.split(";")
            assert all(eval(left) == int(right) for left, right in (step.split("=") for step in working.split(",")))
            assert int(result) == eval(example.prompt.removesuffix("="))
    by_columns = sum(answer.count("=") == 6 for texts in answers.values() for answer in texts)
    assert abs(by_columns - 320) < 5 * (1280 * 0.25 * 0.75) ** 0.5
    for prompt, texts in answers.items():  # terms that are equal give one text
        terms = re.findall("[0-9]+", prompt)
        assert len(set(texts)) == len(set(itertools.permutations(terms))) + 1, "every order, and the columns"


def test_a_warm_start_teaches_as_many_halves_as_its_shares_say():
    stream = WarmStartStream({"chain": SkillShare(share=1.0, first=0.2, second=0.3)}, 1000, seed=3)
    drawn = [example for update in range(10) for example in stream.at(update)]
    halves = Counter("second" if e.partner_answer else "first" if "-" in e.result else "whole" for e in drawn)
    assert abs(halves["first"] - 2000) < 200 and abs(halves["second"] - 3000) < 230  # five standard deviations
    assert all(
        example.partner_answer == "" or example.partner_answer.startswith(example.prompt[1]) for example in drawn
    )


@pytest.mark.nightly
def test_pools_have_the_specified_sizes_and_do_not_overlap():
    sizes = {"add": 90 * 90, "sub": 90 * 91 // 2, "mul": 90 * 8, "srt": 10_000, "sum": 10_000, "chain": 9_555}
    for skill, size in sizes.items():
        training = {e.prompt for e in training_examples(skill)}
        evaluation = [e.prompt for e in evaluation_examples(skill)]
        test = {e.prompt for e in examples_for_test(skill)}
        assert len({e.prompt for e in SKILLS[skill]()}) == size
        assert len(evaluation) == len(set(evaluation)) == 150
        assert not training & set(evaluation) and not training & test and not test & set(evaluation)
        assert {prompt_set(prompt) for prompt in evaluation} == {"validation"}
        assert 0.55 < len(training) / size < 0.65 and 0.17 < len(test) / size < 0.23


def reordered(example):
    """All prompts that ask the same of the same digits, written by hand for each skill."""
    numbers = re.findall(r"\d+", example.prompt)
    if example.skill == "srt":
        return {f"s{''.join(digits)}=" for digits in itertools.permutations(numbers[0])}
    if example.skill in ("add", "sum"):
        return {f"{'+'.join(terms)}=" for terms in itertools.permutations(numbers)}
    if example.skill == "chain":
        a, b, c = numbers
        return {f"{a}+{b}-{c}=", f"{b}+{a}-{c}="}
    return {example.prompt}  # a difference and a product of unequal factors have one order


@pytest.mark.nightly
@pytest.mark.parametrize("skill", list(SKILLS))
def test_no_set_has_a_prompt_that_another_has_in_another_order(skill):
    set_of = {e.prompt: prompt_set(e.prompt) for e in SKILLS[skill]()}
    for example in SKILLS[skill]():
        same = reordered(example)
        assert {set_of[prompt] for prompt in same & set_of.keys()} == {set_of[example.prompt]}, same
        assert len({content_of(prompt) for prompt in same}) == 1, same


def test_prompts_of_other_content_are_not_one():
    """A content has as many prompts as its digits or terms have orders, so none was taken for another one."""
    for skill in ("add", "srt", "sub", "mul"):
        prompts = [e.prompt for e in SKILLS[skill]()]
        orders = Counter(map(content_of, prompts))
        assert all(orders[content_of(e.prompt)] == len(reordered(e)) for e in SKILLS[skill]())


def test_answers_have_the_length_that_the_ratio_needs():
    lengths = [len(e.answer) for skill in ("add", "sub", "mul", "srt") for e in SKILLS[skill]()]
    assert (min(lengths), max(lengths)) == (12, 19)
    lengths = [len(e.answer) for e in SKILLS["sum"]()]
    assert (min(lengths), max(lengths)) == (38, 51)
    assert 48 < sum(lengths) / len(lengths) < 49
    assert {len(e.prompt) for e in SKILLS["sum"]()} == {12}


@pytest.mark.parametrize("name", ["quickstart", "gap"])
def test_every_prompt_and_gold_answer_fits_its_configuration(name):
    """A token has at least one character, so characters and the EOS bound the tokens of every agent."""
    config = load_config(ROOT / "configs" / f"{name}.toml")
    examples = [e for skill in config.data.skills for e in SKILLS[skill]()]
    assert max(len(e.prompt) for e in examples) <= config.rollout.max_prompt_tokens
    assert max(len(e.answer) for e in examples) + 1 <= config.rollout.max_answer_tokens
    for agent in config.agents:
        assert {sign for e in examples for sign in e.prompt + e.answer} <= set(agent.init.vocabulary)
        assert set(agent.init.warm_start.skills) == set(config.data.skills)


def test_the_terms_of_sums_are_spread_evenly():
    """Each place holds each number from 10 to 99, about 10,000 / 90 times: five standard deviations are 52."""
    for place in range(4):
        counts = Counter(int(e.prompt[:-1].split("+")[place]) for e in SKILLS["sum"]())
        assert set(counts) == set(range(10, 100))
        assert all(abs(count - 10_000 / 90) < 52.5 for count in counts.values())


def test_bad_requests_name_what_there_is():
    with pytest.raises(KeyError):
        training_examples("div")
    with pytest.raises(AssertionError):
        evaluation_examples("mul", 151)
    with pytest.raises(AssertionError):
        WarmStartStream({"mul": SkillShare(share=1.0, num_examples=1000)}, batch_size=4, seed=0)


MIX = {
    "add": SkillShare(share=0.6),
    "sub": SkillShare(share=0.03, num_examples=100),
    "mul": SkillShare(share=0.07, num_examples=7),
    "srt": SkillShare(share=0.3),
}


def test_warm_start_keeps_shares_and_distinct_examples():
    stream = WarmStartStream(MIX, batch_size=128, seed=3)
    drawn = [example for update in range(300) for example in stream.at(update)]
    for skill, part in MIX.items():
        of_skill = [e.prompt for e in drawn if e.skill == skill]
        expected = part.share * len(drawn)
        assert abs(len(of_skill) - expected) < 5 * (expected * (1 - part.share)) ** 0.5, part
        if part.num_examples:
            assert len(set(of_skill)) == part.num_examples
    assert {prompt_set(e.prompt) for e in drawn} == {"training"}


@given(seed=st.integers(0, 2**31), update=st.integers(0, 10_000))
def test_warm_start_is_a_pure_function_of_seed_and_update(seed, update):
    one = WarmStartStream(MIX, batch_size=16, seed=seed)
    one.at(0)
    assert one.at(update) == WarmStartStream(MIX, batch_size=16, seed=seed).at(update)


def test_another_process_makes_the_same_batch():
    """A fresh interpreter with another hash seed: nothing may rest on Python's hash()."""
    code = (
        "from hacpo_mega.data.tasks import *; skills = {'add': SkillShare(share=.5, num_examples=9)}; "
        "skills['srt'] = SkillShare(share=.5); print([e.prompt for e in WarmStartStream(skills, 8, 5).at(2)])"
    )
    skills = {"add": SkillShare(share=0.5, num_examples=9), "srt": SkillShare(share=0.5)}
    here = [e.prompt for e in WarmStartStream(skills, 8, 5).at(2)]
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "77"}, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == str(here)
