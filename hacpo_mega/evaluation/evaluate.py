"""One model answers benchmarks through the vLLM engine, is judged, and can be interrupted at any time.

`tp` ranks form an engine (a cell of place.py), `engines` of them share the problems. The remaining work follows
from the files of answers alone, so a resumed evaluation may have another number of engines. An answer's seed is a
pure function of (seed, problem, which answer), never of its place in a batch.
Elsewhere: statistics and their table (table.py). In training the trainer evaluates by itself.
"""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch

from hacpo_grading.graders.registry import final_answer, find_grader
from hacpo_grading.judge import AnyJudge
from hacpo_grading.judgement import Asked, Judgement
from hacpo_mega.checkpoint.stored_agent import StoredAgent
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.cluster.turns import agents_per_device
from hacpo_mega.conversations.player import Player, PlayLimits, environment_of, turn_format
from hacpo_mega.data.prompt_sets import prompt_lengths
from hacpo_mega.data.reading.files import PromptRow
from hacpo_mega.evaluation.answers import (
    Answer,
    AnswerFile,
    Key,
    begun_at,
    check_folder,
    claim,
    finite,
    read_answers,
)
from hacpo_mega.evaluation.benchmarks import Benchmark
from hacpo_mega.evaluation.settings import EvaluationSettings
from hacpo_mega.evaluation.table import summarize
from hacpo_mega.grading.run_judge import environment_judgement, judge_of
from hacpo_mega.logbook.evaluation_file import Evaluation, write_evaluation
from hacpo_mega.logbook.run.provenance import installed_versions, source_commit
from hacpo_mega.megatron.checkpoint.stored_index import read_index
from hacpo_mega.megatron.checkpoint.stored_state import model_weights
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.files.folder import check_positions
from hacpo_mega.models.files.visible import say
from hacpo_mega.records import Completion, Conversation, Prompt, Stop
from hacpo_mega.rollout.engine import Engine
from hacpo_mega.rollout.vllm.engine_spec import EngineSpec
from hacpo_mega.rollout.vllm.row_noise import answer_seed
from hacpo_mega.samples.tokenizers import TextCodec, load_tokenizer

# Answers between two writes, which a killed evaluation loses. With more, the engine is less often half empty.
ANSWERS_PER_WRITE = 512
# Engines that share the problems end hours apart; one that dies is named at once all the same (watchdog.py).
WAIT_S = 86_400.0
EVALUATION_STEP = -1  # no training step: an evaluation never draws the noise of a rollout


@dataclass(frozen=True)
class Request:
    """One answer to be drawn."""

    row: PromptRow
    rollout: int


def evaluate(
    settings: EvaluationSettings, out: Path, tp: int = 1, engines: int = 1, num_judges: int = 1
) -> Evaluation | None:
    """Generates the missing answers and writes `out`; the result on the job's rank 0, None elsewhere.

    Collective over tp * engines processes. Raises ValueError for settings that do not fit the model or the folder.
    """
    check_positions(settings.folder, settings.max_prompt_tokens, settings.longest_answer)
    codec = codec_of(settings)
    settings = _with_time(settings, begun_at(out) if codec.reads_clock else None)
    fingerprint = settings.fingerprint
    check_folder(out, settings.record(fingerprint))
    rank_map = RankMap(engines, (AgentShape("evaluated", tp=tp, engine_tp=tp),))
    with Place.join(rank_map, WAIT_S) as place, ExitStack() as stack:
        is_first = place.coordinate.global_rank == 0
        if codec.reads_clock:
            time = place.share_in_job((codec.prompting.time or "").encode() if is_first else None).decode()
            settings = _with_time(settings, time)
            codec = codec_of(settings)
        asked = settings.record(fingerprint)
        if is_first:
            place.at_end(stack.enter_context(claim(out, asked)).leave)
            if line := codec.added_end_line:
                say(f"{settings.model}: {line}")
        place.barrier()
        run = _Run(settings, codec, out, place, num_judges, stack)
        run.answer_everything()
        place.barrier()
        if not is_first:
            return None
        asked |= {"commit": source_commit(), "packages": installed_versions()}
        evaluation = summarize(asked, settings.benchmarks, run.num_dropped, out, settings.seed)
        write_evaluation(evaluation, out)
        return evaluation


def _with_time(settings: EvaluationSettings, time: str | None) -> EvaluationSettings:
    """The settings with a time for the clock of the chat template, where they have none."""
    if time is None or settings.prompting.time is not None:
        return settings
    return replace(settings, prompting=replace(settings.prompting, time=time))


class _Run:
    """This rank's share of an evaluation."""

    def __init__(
        self,
        settings: EvaluationSettings,
        codec: TextCodec,
        out: Path,
        place: Place,
        num_judges: int,
        stack: ExitStack,
    ) -> None:
        self.settings = settings
        self.out = out
        self.place = place
        self.codec = codec
        self.player: Player | None = None
        self.kept = {b.name: self._within_limit(b) for b in settings.benchmarks}
        self.num_dropped = {b.name: len(b.rows) - len(self.kept[b.name]) for b in settings.benchmarks}
        self._stack = stack
        self._num_judges = num_judges
        self._judges: dict[float, AnyJudge] = {}

    def answer_everything(self) -> None:
        """Draws, judges and writes the answers that are missing. The engine starts only if there are any."""
        if self.place.coordinate.global_rank == 0:
            for benchmark in self.settings.benchmarks:
                self._judge_again(benchmark)
        self.place.barrier()
        missing = {b.name: self._missing(b) for b in self.settings.benchmarks}
        self.place.barrier()  # nobody writes before all have seen the same files
        if not any(missing.values()):
            return
        self._start(next(b for b in self.settings.benchmarks if missing[b.name]))
        for benchmark in self.settings.benchmarks:
            self.place.enter_phase("evaluate", f"on {benchmark.name}")
            self._answer(benchmark, missing[benchmark.name])

    def _within_limit(self, benchmark: Benchmark) -> tuple[PromptRow, ...]:
        rows, most = benchmark.rows, self.settings.max_prompt_tokens
        lengths = prompt_lengths(
            rows, most, self.codec.prompt_lengths, lambda index: f"{benchmark.name}, problem {index + 1}"
        )
        return tuple(row for row, n in zip(rows, lengths, strict=True) if n <= most)

    def _requests(self, benchmark: Benchmark) -> list[Request]:
        return [Request(row, i) for row in self.kept[benchmark.name] for i in range(benchmark.num_answers)]

    def _missing(self, benchmark: Benchmark) -> list[Request]:
        answered = self._answers_kept(benchmark)
        return [request for request in self._requests(benchmark) if (request.row.id, request.rollout) not in answered]

    def _answers_kept(self, benchmark: Benchmark) -> dict[Key, Answer]:
        """Answers that are not drawn again. An unjudged conversation is: its environment may have failed."""
        stored, plays = read_answers(self.out, benchmark.name), self.settings.conversation.environment is not None
        return {key: answer for key, answer in stored.items() if answer.is_judged or not plays}

    def _judge_again(self, benchmark: Benchmark) -> None:
        """Judges the answers that a fault of the judge left unjudged, before others are drawn."""
        kept = self._answers_kept(benchmark)
        problems = {answer.id for answer in kept.values() if not answer.is_judged}
        requests = [request for request in self._requests(benchmark) if request.row.id in problems]
        if not (asked := [request for request in requests if (request.row.id, request.rollout) in kept]):
            return
        with closing(AnswerFile(self.out, benchmark.name, self.place.lane)) as file:
            for batch in batches_of(asked, 0, 1, by_problem=True):
                answers = [kept[request.row.id, request.rollout] for request in batch]
                questions = [self._stored_question(request.row, answer) for request, answer in zip(batch, answers)]
                judged = zip(answers, self._judge_of(benchmark).judge(questions), strict=True)
                file.append(
                    replace(answer, verdict=judgement.verdict.name.lower(), reward=finite(judgement.reward))
                    for answer, judgement in judged
                    if not answer.is_judged and judgement.is_judged
                )

    def _start(self, first: Benchmark) -> None:
        settings = self.settings
        self.place.enter_phase("load", f"of {settings.model}")
        self.engine = engine_of(settings, self.codec, self.place)
        self._stack.callback(self.engine.close)
        environment = environment_of(settings.conversation)
        if environment is not None and self.place.is_leader:
            play = settings.conversation
            limits = PlayLimits(play.max_turns, settings.max_prompt_tokens, settings.longest_answer, play.as_rendered)
            self.player = Player(environment, codec_of(settings), limits)  # with a tokenizer of its own thread
            self._stack.callback(self.player.close)
        compares = self.place.coordinate.global_rank == 0 and self._judge_of(first).compares_groups
        self.compares_groups = bool(self.place.share_in_job(b"1" if compares else b""))

    def _judge_of(self, benchmark: Benchmark) -> AnyJudge:
        """The judge with this benchmark's tolerance, which its workers are started with; the user's own option wins."""
        settings = self.settings
        relative = benchmark.relative if "relative" in find_grader(settings.grader.kind).options else 0.0
        if relative not in self._judges:
            judge = judge_of(settings.rewarded(self._num_judges, relative))
            self._judges[relative] = self._stack.enter_context(judge)
        return self._judges[relative]

    def _answer(self, benchmark: Benchmark, missing: Sequence[Request]) -> None:
        place, by_problem = self.place, self.compares_groups
        # Left by a killed evaluation; answers that other lanes write meanwhile belong to other problems.
        kept = self._answers_kept(benchmark).values() if by_problem and place.is_leader else ()
        writing = closing(AnswerFile(self.out, benchmark.name, place.lane)) if place.is_leader else nullcontext()
        with writing as file:
            for batch in batches_of(missing, place.lane, place.rank_map.lanes, by_problem=by_problem):
                completions = self._draw(benchmark, batch)
                if file is not None:
                    rows = {request.row.id: request.row for request in batch}
                    others = [self._stored_question(rows[answer.id], answer) for answer in kept if answer.id in rows]
                    file.append(self._judged(self._judge_of(benchmark), batch, completions, others))

    def _draw(self, benchmark: Benchmark, batch: Sequence[Request]) -> list[Completion]:
        seeds = [request_seed(self.settings.seed, request) for request in batch]
        sampling = {"max_tokens": self.settings.max_answer_tokens, "temperature": benchmark.temperature}
        if self.settings.conversation.environment is None:
            return self.engine.generate([self.codec.encode_prompt(r.row.text) for r in batch], seeds, **sampling)
        if self.player is None:
            self.engine.serve(None)
            return []
        rows = (request.row for request in batch)
        places = [(Prompt(n, row.id, row.text, row.gold, row.skill, row.row), 0) for n, row in enumerate(rows)]
        return self.player.play(self.engine, places, seeds, **sampling)

    def _judged(
        self, judge: AnyJudge, batch: Sequence[Request], completions: Sequence[Completion], others: Sequence[Asked]
    ) -> list[Answer]:
        texts = [self._text(completion) for completion in completions]
        drawn = zip(batch, texts, completions, strict=True)
        questions = [self._question(one.row, self._opened_thinking(one, c) + text, c.stop) for one, text, c in drawn]
        conversations = [completion.conversation for completion in completions]
        judgements = self._judgements(judge, [*questions, *others], conversations)
        parts = zip(batch, completions, texts, conversations, questions, judgements, strict=True)
        return [
            Answer(
                id=request.row.id,
                rollout=request.rollout,
                seed=request_seed(self.settings.seed, request),
                prompt_seen=self._prompt_seen(request.row, conversation),
                gold=request.row.gold,
                text=text,
                vote=final_answer(self.settings.voted, question.answer),
                verdict=judgement.verdict.name.lower(),
                reward=finite(judgement.reward),
                stop=completion.stop.name.lower(),
                num_tokens=len(completion.token_ids),
            )
            for request, completion, text, conversation, question, judgement in parts
        ]

    def _question(self, row: PromptRow, text: str, stop: Stop) -> Asked:
        """An answer as it is judged; `text` has the thinking that its prompt opened."""
        return Asked(row.text, text, row.gold, stop, row.row, self.settings.agent)

    def _stored_question(self, row: PromptRow, answer: Answer) -> Asked:
        return self._question(row, self.codec.opened_thinking(row.text) + answer.text, Stop[answer.stop.upper()])

    def _judgements(
        self, judge: AnyJudge, questions: Sequence[Asked], conversations: Sequence[Conversation | None]
    ) -> list[Judgement]:
        """Judgements by the environment where it gives a reward or has failed, else by the judge. Questions beyond
        `conversations` serve a judge that compares answers."""
        config = self.settings.rewarded()
        settled = [conversation is not None and conversation.is_settled for conversation in conversations]
        asked = [one for one, is_settled in zip(questions, settled) if not is_settled]
        judged = iter(judge.judge([*asked, *questions[len(conversations) :]]))
        return [
            next(judged) if played is None or not is_settled else environment_judgement(config, played.reward)
            for played, is_settled in zip(conversations, settled, strict=True)
        ]

    def _opened_thinking(self, request: Request, completion: Completion) -> str:
        conversation = completion.conversation
        return self.codec.opened_thinking(request.row.text) if conversation is None else conversation.answer.opened

    def _prompt_seen(self, row: PromptRow, conversation: Conversation | None) -> str:
        shown = self.codec.shown_prompt
        return shown(row.text) if conversation is None else shown(conversation.task or row.text, conversation.opening)

    def _text(self, completion: Completion) -> str:
        if completion.conversation is not None:
            return completion.conversation.answer.content
        ended = completion.stop is Stop.EOS
        text = self.codec.decode_answer(completion.token_ids[:-1] if ended else completion.token_ids)
        return text if self.settings.stop_text is None else text.partition(self.settings.stop_text)[0]


def batches_of(missing: Sequence[Request], lane: int, lanes: int, *, by_problem: bool) -> list[list[Request]]:
    """The answers that a lane draws between two writes. With `by_problem` all of a problem are drawn together."""
    groups = [list(group) for _, group in groupby(missing, key=lambda one: one.row.id if by_problem else one)]
    batches: list[list[Request]] = []
    for group in groups[lane::lanes]:
        if not batches or len(batches[-1]) + len(group) > ANSWERS_PER_WRITE:
            batches.append([])
        batches[-1] += group
    return batches


def codec_of(settings: EvaluationSettings) -> TextCodec:
    """Codec of the model, whose chat template shows the tools of the environment."""
    environment = environment_of(settings.conversation)
    tools = () if environment is None else environment.tools
    return TextCodec(load_tokenizer(settings.folder, settings.trust_remote_code), settings.prompting, tools)


def engine_of(settings: EvaluationSettings, codec: TextCodec, place: Place) -> Engine:
    """An engine with the weights of a folder or a checkpoint, awake. Collective over the job."""
    stored, dtype = settings.stored, getattr(torch, settings.dtype)
    if stored is not None:
        _require_unaltered(stored, place)
    environment = environment_of(settings.conversation)
    agents_per_device(place)  # a second engine of the same GPU would find no memory
    spec = EngineSpec(
        settings.folder,
        max_model_len=settings.max_prompt_tokens + settings.longest_answer,
        dtype=dtype,
        tensor_parallel_size=place.rank_map.agents[0].engine_tp,
        trust_remote_code=settings.trust_remote_code,
        eos_ids=codec.ends.ids if environment is None else turn_format(codec, environment).stop_ids,
        random_weights=stored is not None,
        can_sleep=False,
        timeout_s=WAIT_S,  # the first rank of an engine judges while the others wait for its next turns
        options=settings.vllm,
    )
    engine = Engine(spec)
    if stored is not None:
        lora = stored.agent.adapters(Architecture.from_folder(settings.folder))
        with stored.being_read():
            engine.load(model_weights(stored.folder, settings.folder, lora, dtype))
    return engine


def _require_unaltered(stored: StoredAgent, place: Place) -> None:
    """Every byte of a checkpoint is compared, by all ranks together, before an engine starts."""
    with stored.being_read():
        stored.require_unaltered(slice(place.coordinate.global_rank, None, place.rank_map.world_size))
        read_index(stored.folder)
    place.barrier()


def request_seed(seed: int, request: Request) -> int:
    """The sampling seed of one answer, from the problem's text, wherever it is in which file."""
    problem = int.from_bytes(hashlib.blake2b(request.row.id.encode(), digest_size=7).digest(), "little")
    return answer_seed(seed, EVALUATION_STEP, problem, request.rollout, 0)
