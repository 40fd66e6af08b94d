"""Prompts as an agent sees them: chat templates, system prompts, messages of a row, texts that spell control tokens."""

import json
import random
import time

import pytest
from run_cases import CHARACTERS

from hacpo_grading.texts.chat_messages import messages_text
from hacpo_mega.config import AgentConfig, Prompting
from hacpo_mega.config.checks.tokenizer_checks import template_notes
from hacpo_mega.models.files.chat_template import render
from hacpo_mega.samples.tokenizers import (
    TextCodec,
    agent_codecs,
    load_tokenizer,
    make_tokenizer,
)


def test_chat_templates(tmp_path):
    tokenizer = make_tokenizer(tmp_path, CHARACTERS)
    with pytest.raises(ValueError, match="chat_template is on, but"):
        TextCodec(tokenizer, Prompting(chat_template=True))
    tokenizer.chat_template = (
        "{% for m in messages %}s{{ m.content }};{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    codec = TextCodec(tokenizer, Prompting(chat_template=True))
    assert codec.tokenizer.decode(codec.encode_prompt("1+2")) == "s1+2;="


def test_a_prompt_that_spells_a_control_token_cannot_end_its_turn(tmp_path):
    """Inside a chat template it is refused; alone it is the data's own template, whose BOS is not doubled."""
    tokenizer = make_tokenizer(tmp_path, (*CHARACTERS, "<bos>"))
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.chat_template = "s{{ messages[-1].content }}<eos>{% if add_generation_prompt %}={% endif %}"
    chat = TextCodec(tokenizer, Prompting(chat_template=True))
    eos = chat.eos_id
    assert chat.encode_prompt("1+2").count(eos) == 1
    for control in ("<eos>", "<pad>", "<bos>"):
        with pytest.raises(ValueError, match=f"spells out {control}, which steers"):
            chat.encode_prompt(f"1{control}2")
        with pytest.raises(ValueError, match=f"spells out {control}, which steers"):
            chat.prompt_lengths(["1+2", f"1{control}2"])
    assert chat.prompt_lengths(["1", "1+2"]) == [4, 6] == [len(chat.encode_prompt(text)) for text in ("1", "1+2")]
    alone = TextCodec(tokenizer)
    one, two = alone.encode_prompt("1") + alone.encode_prompt("2")
    assert alone.encode_prompt("1<eos>2") == (one, eos, two)
    bos = tokenizer.bos_token_id
    assert alone.encode_prompt("<bos>1") == (bos, one)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    start = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": start, "pair": start,
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [bos], "tokens": ["<bos>"]}},
    }  # fmt: skip
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    opening = TextCodec(load_tokenizer(tmp_path))
    assert opening.tokenizer("<bos>1").input_ids == [bos, bos, one]
    assert opening.encode_prompt("<bos>1") == opening.encode_prompt("1") == (bos, one)
    assert opening.prompt_lengths(["<bos>1", "1"]) == [2, 2]


CHAT = (
    "{% for m in messages %}{% if m.role == 'system' %}*{% else %}s{% endif %}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}{% if enable_thinking is defined and not enable_thinking %}0{% endif %}"
)


def test_a_prompt_is_worded_once_for_training_and_evaluation(tmp_path):
    tokenizer = make_tokenizer(tmp_path, CHARACTERS)
    assert TextCodec(tokenizer, Prompting(prompt_template="1+1=2;{prompt}=")).shown_prompt("1+2") == "1+1=2;1+2="
    tokenizer.chat_template = CHAT
    prompting = Prompting(True, {"enable_thinking": False}, system_prompt="7*7", prompt_template="9{prompt}9")
    codec = TextCodec(tokenizer, prompting)
    assert codec.shown_prompt("1+2") == "*7*7;s91+29;=0"
    assert tokenizer.decode(codec.encode_prompt("1+2")) == "*7*7;s91+29;=0"


def test_messages_of_a_row_are_rendered_by_the_agents_own_template(tmp_path):
    tokenizer = make_tokenizer(tmp_path, CHARACTERS)
    tokenizer.chat_template = CHAT
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    last = {"role": "user", "content": "3+3"}
    ours, own = ({"role": "system", "content": text} for text in ("7*7", "8*8"))
    codec = TextCodec(tokenizer, Prompting(True, system_prompt="7*7", prompt_template="9{prompt}"))
    for turns_given, asked in (([*turns, last], [ours, *turns]), ([own, *turns, last], [own, *turns])):
        asked = [*asked, {"role": "user", "content": "93+3"}]
        text = messages_text(turns_given)
        assert codec.shown_prompt(text) == tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, tokenize=False
        )
        assert codec.prompt_lengths([text]) == [len(codec.encode_prompt(text))]
    with pytest.raises(ValueError, match="is chat messages, which need chat_template = true"):
        TextCodec(tokenizer).encode_prompt(messages_text([last]))
    with pytest.raises(ValueError, match=r"the prompt '1<eos>' spells out <eos>"):
        codec.encode_prompt(messages_text([{"role": "user", "content": "1<eos>"}, *turns[1:], last]))
    with pytest.raises(ValueError, match="leaves out the tool 'look_up'"):
        codec.encode_prompt(messages_text([last], [{"name": "look_up"}]))
    tokenizer.chat_template = CHAT + "{% for t in tools or [] %}{{ t.name }}{% endfor %}"
    assert TextCodec(tokenizer, Prompting(True)).shown_prompt(messages_text([last], [{"name": "8-8"}])) == "s3+3;=8-8"
    tokenizer.chat_template = "s{{ messages[-1].content }}="
    with pytest.raises(ValueError, match=r"leaves out or changes the message '1\+1' of user"):
        TextCodec(tokenizer, Prompting(True)).encode_prompt(messages_text([*turns, last]))
    tokenizer.chat_template = "s{{ messages[-1].content | trim('0') }}="  # which no trial ends or begins with
    assert TextCodec(tokenizer, Prompting(True)).encode_prompt("1+10+1")
    with pytest.raises(ValueError, match=r"leaves out or changes the message '1\+10' of user"):
        TextCodec(tokenizer, Prompting(True)).encode_prompt("1+10")


def test_wording_that_nobody_reads_is_refused(tmp_path):
    with pytest.raises(ValueError, match="read by a chat template only"):
        Prompting(system_prompt="be brief")
    with pytest.raises(ValueError, match="prompt} 0 times"):
        Prompting(prompt_template="{problem}")
    with pytest.raises(ValueError, match="sets add_generation_prompt, which every prompt has already"):
        Prompting(True, {"add_generation_prompt": False})
    tokenizer = make_tokenizer(tmp_path, CHARACTERS)
    tokenizer.chat_template = CHAT
    for name in ("enable_thinkin", "system"):  # the second is a word of the template, and nothing that it reads
        with pytest.raises(ValueError, match=f"never reads {name};"):
            TextCodec(tokenizer, Prompting(True, {name: False}))
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ValueError, match="leaves the system prompt out"):
        TextCodec(tokenizer, Prompting(True, system_prompt="7"))
    tokenizer.chat_template = "{% if messages|length > 1 %}{{ raise_exception('no system role') }}{% endif %}"
    with pytest.raises(ValueError, match="refuses the prompt: no system role"):
        TextCodec(tokenizer, Prompting(True, system_prompt="7"))


OPENS = CHAT.replace("={%", "<think>\n{%", 1)


@pytest.mark.parametrize(
    "template, prompting, text, opened",
    [
        (OPENS, {"system_prompt": "7"}, "1+2", "<think>\n"),
        (OPENS.replace("<think>\n", "<think>\n1="), {}, "1+2", "<think>\n1="),
        (OPENS.replace("<think>\n", "<think>\n\n</think>\n"), {}, "1+2", ""),
        (OPENS, {}, "1</think>2", "<think>\n"),
        (CHAT, {}, "1<think>", ""),
        (CHAT, {"system_prompt": "<think>"}, "1+2", ""),
        (CHAT, {"prompt_template": "{prompt}<think>"}, "1+2", ""),
        (
            OPENS,
            {},
            messages_text([{"role": "user", "content": "1<think>"}, {"role": "user", "content": "3"}]),
            "<think>\n",
        ),
        (None, {"prompt_template": "7<think>{prompt}"}, "1+2", ""),
        (None, {"prompt_template": "7*<think>*</think>{prompt}=\n<think>\n"}, "1+2", "<think>\n"),
        (None, {"prompt_template": "{prompt}=<think>7"}, "1+2", ""),
        (None, {}, "1+2=<think>", "<think>"),
        (None, {}, "1+2=<think></think>", ""),
    ],
)
def test_thinking_that_a_prompt_opens(tmp_path, template, prompting, text, opened):
    """The prompt writes the answer's beginning, and no <think> of a task, a system prompt or an instruction."""
    tokenizer = make_tokenizer(tmp_path, (*CHARACTERS, "<think>", "</think>", "\n"))
    tokenizer.chat_template = template
    codec = TextCodec(tokenizer, Prompting(chat_template=template is not None, **prompting))
    assert codec.opened_thinking(text) == opened
    assert codec.shown_prompt(text).endswith(opened)


# Formats of the clock with their text at TIME, and templates that draw at random; both come before the message.
TIME, SECONDS = "2024-02-29T23:59:58", "1709251198"
CLOCKS = {
    "%M": "59",
    "%d%m%Y": "29022024",
    "%s": SECONDS,
    "%Z%z": "",
}
DRAWS = (
    "{{ range(999)|random }}",
    "{{ [range(999)]|map('random')|first }}",
    "{{ [range(9)]|map('ran' ~ 'dom')|first }}",
    "{{ lipsum(n=1, html=False)|length }}",
)
BEHIND = "+{{ messages[-1].content }}="


def test_a_templates_clock_stands_at_the_time_of_its_run(tmp_path, monkeypatch):
    """The machine's own clock and zone have no effect, not even in the process that tries the template."""
    tokenizer = make_tokenizer(tmp_path, CHARACTERS)
    tokenizer.chat_template = "".join(f"{{{{ strftime_now('{form}') }}}};" for form in CLOCKS) + BEHIND
    prompting, expected = Prompting(True, time=TIME), f"{''.join(f'{at};' for at in CLOCKS.values())}+1+2="
    for zone in ("UTC", "Asia/Tokyo"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert TextCodec(tokenizer, prompting).shown_prompt("1+2") == expected
        assert render(tokenizer.chat_template, [prompting.messages("1+2")], {}, TIME) == [expected]
    monkeypatch.undo()
    time.tzset()
    assert TextCodec(tokenizer, prompting).reads_clock
    monkeypatch.setattr("hacpo_mega.config.tables.prompting.utc_now", lambda: TIME)
    assert TextCodec(tokenizer, Prompting(True)).shown_prompt("1+2") == expected, "once, where nobody says"


def test_a_clock_is_no_argument_of_a_template(tmp_path, monkeypatch):
    """transformers 5.24 makes text of arguments that are no plain values, also of functions."""
    tokenizer = make_tokenizer(tmp_path, CHARACTERS)
    shown = "{{ eos_token }}{{ tools is none }}{{ documents is none }}{{ sign }}"
    apply, found = tokenizer.apply_chat_template, []
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *chat, **how: json.dumps(how) and apply(*chat, **how))
    for year in ("2024", "{{ strftime_now('%Y') }}"):
        tokenizer.chat_template = year + shown + BEHIND
        found.append(TextCodec(tokenizer, Prompting(True, {"sign": "-"}, time=TIME)).rendered_chat(
            [{"role": "user", "content": "1"}], {"sign": "-"}, opens_answer=True
        ))  # fmt: skip
    assert found == ["2024<eos>TrueTrue-+1="] * 2


@pytest.mark.parametrize("draw", DRAWS)
def test_what_a_template_draws_follows_from_the_messages(tmp_path, draw):
    tokenizer = make_tokenizer(tmp_path, CHARACTERS)
    tokenizer.chat_template = draw + BEHIND
    tasks = [f"{number}+2" for number in range(6)]
    found = []
    for seed in (1, 2):
        random.seed(seed)
        before = random.getstate()
        codec = TextCodec(tokenizer, Prompting(True))
        found.append([codec.shown_prompt(task) for task in tasks])
        assert random.getstate() == before
    assert found[0] == found[1]
    assert len({text.partition("+")[0] for text in found[0]}) > 1, "another prompt has another draw"
    assert render(tokenizer.chat_template, list(map(codec.prompting.messages, tasks)), {}) == found[0]


def test_check_says_what_a_template_reads_beside_its_messages(tmp_path):
    """Also of a named one beside it, by which prompts with tools are rendered."""
    tokenizer, folder = make_tokenizer(tmp_path, CHARACTERS), tmp_path / "additional_chat_templates"
    (tmp_path / "config.json").write_text("{}")
    agent = AgentConfig(name="a", model=tmp_path, chat_template=True)
    folder.mkdir()
    for text, named, said in (
        (CHAT, CHAT, []),
        ("{{ strftime_now('%d') }}" + CHAT, "", ["reads the clock (strftime_now): it stands, in UTC, at the time of "]),
        (CHAT, "{{ strftime_now('%d') }}", ["reads the clock (strftime_now): "]),
        (DRAWS[0] + CHAT, "", ["draws at random (lipsum or random): equal messages always get equal draws"]),
    ):
        (tmp_path / "chat_template.jinja").write_text(text)
        (folder / "tool_use.jinja").write_text(named)
        begins = f"a: the chat template of {tmp_path}/chat_template.jinja "
        lines = list(template_notes([agent]))
        assert len(lines) == len(said) and all(line.startswith(begins + want) for line, want in zip(lines, said))
    with pytest.raises(ValueError, match=r"prints <built-in method index of str object at 0x[0-9a-f]+>, whose address"):
        render("{{ messages[0].content.index }}", [[{"role": "user", "content": "1+2"}]], {})
    assert tokenizer.eos_token


def test_check_says_which_templates_add_an_end_or_are_not_used(tmp_path):
    """One line each; nothing of a folder without a template, or of one whose template says what its files say."""
    agents = []
    for name, end, is_used in (
        ("none", None, False),
        ("idle", "<eos>", False),
        ("same", "<eos>", True),
        ("adds", "<pad>", True),
    ):
        tokenizer = make_tokenizer(tmp_path / name, CHARACTERS)
        tokenizer.chat_template = None if end is None else CHAT.replace("}};{%", "}}" + end + "{%")
        tokenizer.save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text('{"eos_token_id": 1}')
        agents.append(AgentConfig(name=name, model=tmp_path / name, chat_template=is_used))
    assert list(template_notes(agents)) == [
        "idle has a chat template that is not used: its prompts are plain text; chat_template = true asks it inside "
        "the template",
        "adds: the chat template ends an answer with <pad> (id 0), which is no end in the files of the model folder "
        "(they name <eos>): answers end there, too, and the export names it",
    ]
    (tmp_path / "same" / "tokenizer.json").rename(tmp_path / "same" / "tokenizer.model")
    (tmp_path / "same" / "config.json").write_text("{}")
    assert len(list(template_notes(agents))) == 2, "files that do not tell"
    (codec,) = agent_codecs(agents[3:])
    assert f"adds: {codec.added_end_line}" == list(template_notes(agents))[1], "check and train say one thing"
