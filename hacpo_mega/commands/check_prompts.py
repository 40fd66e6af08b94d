"""`hacpo-mega check --data`: every row of the prompt files, how many prompts the tokenizers leave, and one of them.

Not here: what can be said without reading the files (config/), and datasets that no run names (inspect_data.py).
"""

from collections.abc import Iterator, Sequence

from hacpo_mega.config import Config
from hacpo_mega.config.input_checks import missing_models
from hacpo_mega.config.schema import RewardPartConfig
from hacpo_mega.data.files import PromptRow
from hacpo_mega.data.prompt_files import require_good_files
from hacpo_mega.data.prompt_sets import held_out_prompts, training_sampler
from hacpo_mega.grading.judge import Judge
from hacpo_mega.grading.kinds import find_kind
from hacpo_mega.models.visible import one_line
from hacpo_mega.records import Stop
from hacpo_mega.samples.tokenizers import TextCodec, agent_codecs, longest_encodings

MOST_LINES, MOST_CHARACTERS = 20, 200  # of a prompt, of each line


def check_prompts(config: Config) -> str:
    """What a run would train and evaluate on, in a sentence, and its first prompt as every agent and the judge read it.

    ValueError with a line per problem.
    """
    require_good_files(config)
    files = f"{len(config.data.files) + len(config.evaluation.files)} data files read, no bad row"
    if missing_models(config):
        return f"{files}; prompts not counted in tokens before `hacpo-mega init` has made the models"
    codecs = agent_codecs(config.agents)
    num_tokens = longest_encodings(config.agents, codecs)
    sampler, num_dropped = training_sampler(config, num_tokens)
    held_out = held_out_prompts(config, num_tokens)
    found = (
        f"{files}; {sum(map(len, sampler.groups))} prompts to train on, {num_dropped} longer than "
        f"rollout.max_prompt_tokens left out; {len(held_out)} to evaluate on"
    )
    return "\n".join((found, *_as_read(config, codecs, sampler.groups[0][0])))


def _as_read(config: Config, codecs: Sequence[TextCodec], row: PromptRow) -> Iterator[str]:
    for agent, codec in zip(config.agents, codecs, strict=True):
        num_tokens = len(codec.encode_prompt(row.text))
        yield f"\n{agent.name} reads of the first prompt {num_tokens} tokens:"
        yield from _lines(codec.shown_prompt(row.text))
        first, *others = map(codec.token_text, codec.ends.ids)
        also = f"; an own answer may end with {', '.join(others)}, too" if others else ""
        yield f"  an answer, also of another agent, ends with {first}{also}"
    for key, grader in config.reward.graders.items():
        yield f"\nits gold, as {key} reads it:"
        yield from _lines(_read_gold(grader, config.reward.timeout_s, row))


def _read_gold(grader: RewardPartConfig, timeout_s: float, row: PromptRow) -> str:
    """What a judge makes of a gold that stands as the answer; of graders that run code or ask a server, the text."""
    kind = find_kind(grader.kind)
    if kind.is_own or grader.kind in ("program", "model"):
        return row.gold
    with Judge(grader.kind, timeout_s=timeout_s, options=grader.options) as judge:
        answer = kind.gold_as_answer(row.gold)
        ((judgement, said),) = judge.judge_and_explain([row.text], [row.gold], [answer], [Stop.EOS])
        error = judge.take_report().first_error
    read = next((said[name] for name in ("parsed_gold", "gold") if said.get(name) is not None), row.gold)
    return str(read) if judgement.is_judged else f"{row.gold} CANNOT BE JUDGED: {error}"


def _lines(text: str) -> Iterator[str]:
    """A text line by line, of a long one the beginning and the end."""
    lines = [_cut(one_line(line)) for line in text.split("\n")]
    hidden = len(lines) - MOST_LINES
    if hidden > 0:
        half = MOST_LINES // 2
        lines[half:-half] = [f"... {hidden} lines ..."]
    yield from (f"  | {line}" for line in lines)


def _cut(line: str) -> str:
    half = MOST_CHARACTERS // 2
    return line if len(line) <= MOST_CHARACTERS else f"{line[:half]} [...] {line[-half:]}"
