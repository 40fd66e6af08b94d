"""The folder of an export: what its readers need and nothing else; whole or not there, never another's removed, and one
of two at a time."""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from markdown_it import MarkdownIt
from run_cases import CHARACTERS
from transformers import AutoTokenizer

from hacpo_mega.commands.export import OWNER_FILE, TrainedAgent, draft_of, model_card
from hacpo_mega.config import Config
from hacpo_mega.logbook.run.run_lock import signature
from hacpo_mega.megatron.weights.hf_writer import copy_beside_weights, write_adapter, write_weights
from hacpo_mega.models.sharding.lora import Lora
from hacpo_mega.models.sharding.segments import Source
from hacpo_mega.samples.tokenizers import make_tokenizer

KEPT = ("LICENSE.txt", "USE_POLICY.md", "chat_template.jinja", "generation_config.json", "merges.txt", "qwen.tiktoken")
LEFT = (
    *("README.md", "adapter_config.json", "adapter_model.bin", "adapter_model.safetensors", "training_args.bin"),
    *("optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth", "preprocessor_config.json", "params.json"),
    *("model.safetensors.index.json", "pytorch_model.bin.index.json", "consolidated.safetensors", "modeling_x.py"),
    *(".gitattributes", "notes.json", "additional_chat_templates/notes.txt", "original/params.json"),
)
DEFAULT = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOOLS = "{{ tools | tojson }}" + DEFAULT


@pytest.fixture
def crowded(tmp_path) -> Path:
    """A model folder with a template for tools beside the default one, and with what folders collect."""
    folder = tmp_path / "model"
    folder.mkdir()
    make_tokenizer(folder, CHARACTERS)
    for name in (*KEPT, *LEFT):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text(DEFAULT)
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
    (folder / "config.json").write_text('{"model_type": "qwen3", "torch_dtype": "float32"}')
    return folder


def test_a_copy_has_what_its_readers_need_and_nothing_else(crowded, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    copy_beside_weights(crowded, out, torch.bfloat16)
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    assert found == {*KEPT, *tokenizer, "config.json", "additional_chat_templates/tool_use.jinja"}
    assert json.loads((out / "config.json").read_text()) == {"model_type": "qwen3", "torch_dtype": "bfloat16"}
    there, here = (AutoTokenizer.from_pretrained(folder) for folder in (crowded, out))
    assert there.chat_template == here.chat_template == {"default": DEFAULT, "tool_use": TOOLS}
    asked = [{"role": "user", "content": "1+1="}]
    for tools in (None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]):
        texts = [read.apply_chat_template(asked, tools=tools, tokenize=False) for read in (there, here)]
        assert texts[0] == texts[1] and ("function" in texts[1]) == bool(tools)


def test_code_of_a_folder_goes_with_it_where_the_folder_names_it(crowded, tmp_path):
    (crowded / "config.json").write_text('{"auto_map": {"AutoConfig": "modeling_x.C"}, "torch_dtype": "float32"}')
    (tmp_path / "out").mkdir()
    copy_beside_weights(crowded, tmp_path / "out", torch.float32)
    assert (tmp_path / "out" / "modeling_x.py").is_file()


def test_weights_may_be_read_by_whom_everything_else_may(tmp_path):
    before = os.umask(0o027)
    try:
        weights = {"w": torch.ones(2)}
        write_weights(iter(weights.items()), [Source("w", (2,))], tmp_path, torch.float32)
        write_adapter(weights, Lora(1, 1.0, ("w",)), tmp_path, tmp_path)
    finally:
        os.umask(before)
    assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == dict.fromkeys(
        ("model.safetensors", "adapter_model.safetensors", "adapter_config.json"), 0o640
    )


def test_an_export_is_no_part_of_a_run(tmp_path):
    run = tmp_path / "run"
    (run / "agents").mkdir(parents=True)
    for name in ("config.toml", "starts.jsonl"):
        (run / name).touch()
    (tmp_path / "link").symlink_to("run")
    for out in (run, run / "agents" / "x", run / "new" / "x", tmp_path / "link" / "x"):
        with pytest.raises(ValueError, match=r"exists: give|x lies in the run .*/run, which"), draft_of(out):
            pass
    assert sorted(path.name for path in run.rglob("*")) == ["agents", "config.toml", "starts.jsonl"]


@pytest.mark.nightly
def test_an_export_is_whole_or_not_there(tmp_path):
    with suppress(RuntimeError), draft_of(tmp_path / "out") as draft:
        (draft / "half").write_text("")
        raise RuntimeError("in the middle")
    assert not (tmp_path / "out").exists()
    with draft_of(tmp_path / "out") as draft:
        (draft / "whole").write_text("")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["whole"]


@pytest.mark.nightly
@pytest.mark.parametrize("fails", [True, False])
def test_an_export_removes_no_folder_but_its_own(fails, tmp_path):
    """A user's folders beside it stay, and so do drafts of exports that still go on; drafts of killed exports go."""
    mine = [f"out{end}" for end in (".part", ".unquantized", ".partial")] + [".out.partial", ".out.mine.partial"]
    for name in mine:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious.txt").write_text(name)
    alive, far, dead = (tmp_path / f".out.{name}.partial" for name in ("alive", "far", "dead"))
    for draft, process, space in ((alive, os.getpid(), None), (far, 2**22, "another boot"), (dead, 2**22, None)):
        draft.mkdir()
        person, known = signature("x").splitlines()
        known = json.loads(known) | {"pid": process} | ({"space": space} if space else {})
        (draft / OWNER_FILE).write_text(f"{person}\n{json.dumps(known)}\n")
    with suppress(RuntimeError), draft_of(tmp_path / "out") as draft:
        (draft / "config.json").write_text("{}")
        if fails:
            raise RuntimeError("in the middle")
    assert all((tmp_path / name / "precious.txt").read_text() == name for name in mine)
    assert (alive.exists(), far.exists(), dead.exists()) == (True, True, False)
    left = {path.name for path in tmp_path.iterdir()} - {*mine, alive.name, far.name}
    assert left == (set() if fails else {"out"})
    assert fails or [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


@pytest.mark.nightly
def test_two_exports_to_one_name_leave_one_whole_folder(tmp_path):
    def export_second() -> None:
        with draft_of(tmp_path / "out") as second:
            assert second != first
            (tmp_path / "out").mkdir()  # empty: the kernel would let a folder take its place

    with draft_of(tmp_path / "out") as first:
        with pytest.raises(ValueError, match="exists by now"):
            export_second()
        (tmp_path / "out").rmdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


HOSTILE = (
    *(
        "`",
        "``",
        "`` ` ``",
        "|",
        "a|b",
        "\\|",
        "\\",
        "\\`",
        "\n# big",
        "\n\n| a | b |\n|---|---|",
        "```",
        "\r~~~\r",
        "-->",
        "<!--",
    ),
    *("<script>alert(1)</script>", "`<img src=x onerror=y>`", "](http://x)[", "![x](http://x)", "**b**", "_i_", "&lt;"),
    *(
        "---",
        "http://x.y",
        "www.x.y",
        "a@b.c",
        "$x$",
        "{{x}}",
        "\x1b[2J",
        "\u202ex",
        "\u2028",
        " ",
        "x y" * 100,
        "\udcff",
    ),
)


def card_of(text: str) -> str:
    """A model card in which everything that a stranger can choose freely is `text`."""
    in_path = "".join(sign for sign in text if sign.isprintable() and sign != "/")[:99]  # a configuration has no others
    kind = f"/home/me/{in_path}/g.py:f"
    prompting = {"chat_template": True, "system_prompt": text, "chat_template_kwargs": {"k": text}}
    named = {"name": "a", "model": f"/home/me/m{in_path}", "lora": {"rank": 1, "targets": [text]}}
    table = {"run_dir": "r", "num_steps": 1, "agents": [named | prompting]}
    table |= {"data": {"files": [f"/home/me/{in_path}d"]}, "reward": {"kind": kind}}
    config = Config.model_validate(table)
    run = Path("/home/me") / (text.replace("/", "") or "r")
    return model_card(TrainedAgent(run, None, None, config, config.agents[0], 1, (), text))


def structure(card: str, *, html: bool) -> list[str]:
    """The kinds of all elements of a page, in order, and that no text is outside of code but ours."""
    head, text = card.split("---\n", 2)[1:]
    assert [line.split(": ")[0] for line in head.splitlines()] == ["base_model", "library_name", "pipeline_tag"]
    assert all(isinstance(json.loads(line.split(": ", 1)[1]), str) for line in head.splitlines())
    blocks = MarkdownIt("commonmark", {"html": html}).enable("table").parse(text)
    return [part.type for block in blocks for part in (block, *(block.children or ()))]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_card_quotes_becomes_markdown_of_its_own(text: str) -> None:
    """Neither a heading, a link, a cell, HTML, nor a folder of the machine on which it was trained."""
    for html in (False, True):
        found = structure(card_of(text), html=html)
        assert found == structure(card_of("no word"), html=html), card_of(text)
        assert not {"html_inline", "html_block", "link_open", "image"} & set(found)
    assert "/home" not in card_of(text) and "\x1b" not in card_of(text)
    assert "\n| reward | `g.py:f` |\n" in card_of(text)
