"""`hacpo-mega init`: small models from scratch, and their supervised warm start through the same Megatron actor.

For every agent with an [agents.init] table whose folder does not exist: random weights and a tokenizer of its own
are written as a Hugging Face folder, trained on worked arithmetic, and written again. Agents train at the same time,
each on its own ranks and in its own parallel layout.
Elsewhere: reinforcement learning (trainer.py). A real run starts from published models and never comes here.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import AgentConfig, Config, InitConfig, WarmStartConfig
from hacpo_mega.conversations.player import environment_of
from hacpo_mega.conversations.turn_format import TurnFormat
from hacpo_mega.data.tasks import Example, WarmStartStream
from hacpo_mega.megatron.actor import Actor, ActorSpec
from hacpo_mega.models.families.families import FAMILIES
from hacpo_mega.models.files.visible import say
from hacpo_mega.records import TokenSequence
from hacpo_mega.samples.tokenizers import TextCodec, load_tokenizer, make_tokenizer

REPORT_EVERY = 100


def initialize(config: Config) -> None:
    """Creates and warm-starts this rank's agent, if its model folder does not exist. Collective over the job."""
    with Place.join(RankMap.of(config), config.wait_s, config.stall_s) as place:
        spec = config.agents[place.agent]
        is_missing = spec.init is not None and not (spec.model / "config.json").is_file()
        # The agent's own folder appears only when it is complete: an interrupted warm start starts again.
        draft = spec.model.with_name(spec.model.name + ".init")
        if is_missing and place.coordinate.agent_rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            create_model(draft, spec.init, config.seed)
        place.barrier()
        if is_missing and place.trains:
            _train_draft(spec, draft, place, config)
        place.barrier()
        if is_missing and place.coordinate.agent_rank == 0:
            draft.rename(spec.model)


def _train_draft(spec: AgentConfig, draft: Path, place: Place, config: Config) -> None:
    """Warm-starts the model in `draft`, if the agent has a table for it. Collective over the agent's training ranks."""
    plan = spec.init.warm_start
    if plan is None:
        return
    actor_spec = ActorSpec(
        layout=spec.layout(config.lanes),
        optimizer=plan.optimizer,
        total_updates=plan.num_updates,
        max_positions=spec.init.max_positions,
        max_tokens_per_microbatch=config.training.max_tokens_per_microbatch,
        seed=config.seed,
        transformer=spec.transformer,
        communication=spec.data_parallel,
        overrides=spec.megatron,
        timeout_s=config.wait_s,
    )
    actor = Actor(draft, actor_spec)
    place.enter_phase("warm_start", "before any step")
    codec = TextCodec(load_tokenizer(draft))
    environment = environment_of(config.conversation, has_roles=bool(config.roles))
    turns = None if environment is None else TurnFormat.of(codec, environment.tools)
    warm_start(actor, codec, plan, place, config.seed, turns)
    actor.save_hf(draft)


def create_model(folder: Path, init: InitConfig, seed: int) -> None:
    """Writes a Hugging Face folder: random fp32 weights of the table's sizes and a tokenizer of its vocabulary."""
    random_model(folder, init, make_tokenizer(folder, init.vocabulary), seed)


def random_model(folder: Path, init: InitConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    """Writes fp32 random weights of the table's sizes for a tokenizer that is in the folder already."""
    model_config = AutoConfig.for_model(
        init.family,
        **FAMILIES[init.family].new_config_fields,
        vocab_size=len(tokenizer),
        hidden_size=init.hidden_size,
        intermediate_size=init.ffn_size,
        num_hidden_layers=init.num_layers,
        num_attention_heads=init.num_heads,
        num_key_value_heads=init.num_kv_heads,
        head_dim=init.head_dim,
        max_position_embeddings=init.max_positions,
        tie_word_embeddings=init.tied_embeddings,
        rms_norm_eps=1e-6,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(model_config, dtype=torch.float32).save_pretrained(folder)


def warm_start(
    actor: Actor, codec: TextCodec, plan: WarmStartConfig, place: Place, seed: int, turns: TurnFormat | None = None
) -> None:
    """Trains the actor on `plan.num_updates` batches of worked answers; every cell takes its share of each batch.

    `turns` are the agent's tokens of what others say: a calculator's results, another agent's half of the work.
    """
    stream = WarmStartStream(plan.skills, plan.batch_size, seed)
    coordinate = place.coordinate
    share = place.rank_map.share_of_agent(coordinate)
    for update in range(plan.num_updates):
        worked = [worked_sequence(example, codec, turns) for example in stream.at(update)]
        num_trained = sum(sequence.num_trained for sequence in worked)
        result = actor.learn_supervised(worked[share], num_trained)
        if coordinate.agent_rank == 0 and (update + 1) % REPORT_EVERY == 0:
            say(f"{coordinate.agent_name}: warm start {update + 1}/{plan.num_updates}, loss {result.loss:.4f}")


def worked_sequence(example: Example, codec: TextCodec, turns: TurnFormat | None = None) -> TokenSequence:
    """A worked example; every own token is trained, EOS included."""
    opening = turns.text_of_others([{"content": example.partner_answer}]) if example.partner_answer else ""
    prompt_ids = np.array(codec.encode_prompt(example.prompt, opening), dtype=np.int32)
    if not example.call:
        answer_ids = np.array(codec.encode_answer(example.answer, ended=True), dtype=np.int32)
        return TokenSequence(prompt_ids, answer_ids, num_trained=len(answer_ids))
    call, last = (codec.encode_answer(text, ended=True) for text in (f"?{example.call}", f";{example.result}"))
    result = [{"role": "tool", "content": example.result}]
    said = turns.continuation([*prompt_ids.tolist(), *call], result, ended=True)
    answer_ids = np.array([*call, *said, *last], dtype=np.int32)
    start = len(call) + len(said)
    places = np.array([*range(len(call)), *range(start, len(answer_ids))], dtype=np.int32)
    return TokenSequence(prompt_ids, answer_ids, len(places), trained_places=places)
