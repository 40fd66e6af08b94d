"""`hacpo-mega serve`: the endpoint of a model without a trainer, for environments and agent programs before a job.

The clients name the conversations; one key is valid for all. Elsewhere: the routes and the requests that they refuse
(conversations/endpoint.py).
"""

import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.cluster.security.secret import key_in_file
from hacpo_mega.config import Prompting
from hacpo_mega.conversations.endpoint import Endpoint
from hacpo_mega.conversations.foreign_conversation import Terms
from hacpo_mega.conversations.seat import PlayLimits
from hacpo_mega.conversations.turn_format import TurnFormat
from hacpo_mega.conversations.turn_queue import TurnQueue
from hacpo_mega.evaluation.evaluate import engine_of
from hacpo_mega.evaluation.settings import EvaluationSettings
from hacpo_mega.models.files.folder import check_positions
from hacpo_mega.models.files.visible import say
from hacpo_mega.rollout.vllm.engine_loop import ServeTally, order_of_arrival
from hacpo_mega.samples.tokenizers import TextCodec, load_tokenizer

WAIT_S = 86_400.0  # of the engine's ranks for a request
MAX_TURNS = 1000  # of a conversation


def serve(
    settings: EvaluationSettings,
    name: str,
    *,
    tp: int = 1,
    socket: Path | None = None,
    temperature: float | None = None,
) -> None:
    """Serves until SIGTERM or Ctrl-C. Collective over `tp` processes, which form the engine.

    Raises ValueError for settings that do not fit the model, and for a chat template in which no conversation can be
    written.
    """
    check_positions(settings.folder, settings.max_prompt_tokens, settings.max_answer_tokens)
    tokenizer = load_tokenizer(settings.folder, settings.trust_remote_code)
    if settings.prompting == Prompting() and tokenizer.chat_template:
        settings = replace(settings, prompting=replace(settings.prompting, chat_template=True))
    codec = TextCodec(tokenizer, settings.prompting)
    turn_kind = TurnFormat.of(codec).kind
    with Place.join(RankMap(1, (AgentShape("served", tp=tp, engine_tp=tp),)), WAIT_S) as place, ExitStack() as stack:
        engine = engine_of(settings, codec, place)
        stack.callback(engine.close)
        place.enter_phase("serve", f"of {name}")
        place.watchdog.defers_signals = True
        if not place.is_leader:
            engine.serve(None)
            return
        turns = TurnQueue(engine.turn_limits)
        signal.signal(signal.SIGTERM, lambda *_: turns.finish())
        max_tokens = engine.max_model_len
        terms = Terms(engine.eos_ids, PlayLimits(MAX_TURNS, max_tokens, max_tokens), max_tokens, temperature)
        key, file = stack.enter_context(key_in_file("serve.key"))
        endpoint = Endpoint(
            turns, name, key, lambda tools: TurnFormat.of(codec, tools, plays_user=True), terms, seed=settings.seed
        )
        address = endpoint.start(socket)
        stack.callback(endpoint.stop)
        say(f"address {address}/v1 (one conversation: {address}/conversations/NAME/v1, or the header X-Session-ID)")
        say(f"key     in the file {file}")
        say(f"model   {name}: {max_tokens} tokens, turns by {turn_kind}; {order_of_arrival(engine.odd_row_counts)}")
        tally = engine.serve(turns)
        say(_summary(tally, endpoint))


def _summary(tally: ServeTally, endpoint: Endpoint) -> str:
    refused = ", ".join(f"{count} {kind}" for kind, count in endpoint.refused.most_common()) or "none"
    return (
        f"{tally.num_turns} turns of {tally.num_tokens} tokens; {tally.num_cached_tokens} of {tally.num_prompt_tokens} "
        f"prompt tokens were cached; {tally.step_s:.1f} s in {tally.num_steps} steps; refused: {refused}"
    )
