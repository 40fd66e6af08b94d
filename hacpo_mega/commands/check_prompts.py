"""`hacpo-mega check --data`: every row of the prompt files, and how many prompts the agents' tokenizers leave.

Not here: what can be said without reading the files (config/), and datasets that no run names (inspect_data.py).
"""

from hacpo_mega.config import Config
from hacpo_mega.config.input_checks import missing_models
from hacpo_mega.data.prompt_files import require_good_files
from hacpo_mega.data.prompt_sets import held_out_prompts, training_sampler
from hacpo_mega.samples.tokenizers import agent_codecs, longest_encodings


def check_prompts(config: Config) -> str:
    """What a run would train and evaluate on, in a sentence. ValueError with a line per problem."""
    require_good_files(config)
    files = f"{len(config.data.files) + len(config.evaluation.files)} data files read, no bad row"
    if missing_models(config):
        return f"{files}; prompts not counted in tokens before `hacpo-mega init` has made the models"
    num_tokens = longest_encodings(agent_codecs(config.agents))
    sampler, num_dropped = training_sampler(config, num_tokens)
    held_out = held_out_prompts(config, num_tokens)
    return (
        f"{files}; {sum(map(len, sampler.groups))} prompts to train on, {num_dropped} longer than "
        f"rollout.max_prompt_tokens left out; {len(held_out)} to evaluate on"
    )
