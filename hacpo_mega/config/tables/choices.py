"""Names that a configuration may use and other rooms give a meaning to, with the facts about them that are needed here.

`data/tasks.py` makes the prompts of every skill; tests hold that it agrees with this list. Elsewhere: the graders
(hacpo_grading/graders/registry.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TRACKERS = ("wandb", "trackio", "swanlab", "mlflow", "comet_ml")

Skill = Literal["add", "sub", "mul", "srt", "sum", "chain"]


@dataclass(frozen=True)
class SkillSize:
    """Number of different prompts of a skill to train on, and of those held out for evaluation."""

    num_training: int
    num_held_out: int


SKILLS: Mapping[Skill, SkillSize] = {
    "add": SkillSize(4867, 1601),
    "sub": SkillSize(2457, 826),
    "mul": SkillSize(420, 150),
    "srt": SkillSize(6138, 1877),
    "sum": SkillSize(5992, 2005),
    "chain": SkillSize(5724, 1948),
}

# Words of other trainers (verl, TRL, NeMo-RL, OpenRLHF, slime) by the key that means the same here.
_WORDS = {
    "agents.optimizer.lr": "learning_rate actor_lr policy_lr",
    "agents.optimizer.betas": "adam_beta1 adam_beta2 adam_betas",
    "agents.optimizer.eps": "adam_epsilon adam_eps",
    "agents.optimizer.clip_grad": "max_grad_norm grad_clip max_norm",
    "agents.optimizer.warmup_updates": "warmup_steps warmup_ratio lr_warmup_steps lr_warmup_iters",
    "agents.optimizer.schedule": "lr_scheduler_type lr_scheduler lr_decay_style lr_schedule",
    "agents.model": "model_path model_name model_name_or_path pretrained hf_checkpoint actor",
    "agents.tp": "tensor_parallel_size tensor_model_parallel_size tp_size",
    "agents.pp": "pipeline_parallel_size pipeline_model_parallel_size pp_size",
    "agents.cp": "context_parallel_size cp_size",
    "agents.ep": "expert_parallel_size expert_model_parallel_size ep_size",
    "agents.engine_tp": "rollout_tp vllm_tensor_parallel_size rollout_num_gpus_per_engine",
    "agents.vllm.gpu_memory_utilization": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "agents.recompute": "gradient_checkpointing enable_gradient_checkpointing "
    "activation_checkpointing recompute_granularity",
    "agents.lora.rank": "r lora_rank lora_r",
    "agents.lora.alpha": "lora_alpha",
    "agents.lora.targets": "target_modules lora_target_modules",
    "num_steps": "max_steps steps total_steps total_training_steps max_num_steps "
    "num_train_epochs epochs total_epochs num_epochs num_rollout train_iters",
    "run_dir": "output_dir default_local_dir checkpoint_dir log_dir save_dir",
    "algorithm.method": "adv_estimator advantage_estimator loss_type estimator",
    "algorithm.kl_coef": "kl kl_loss_coef kl_coeff init_kl_coef beta reference_policy_kl_penalty kl_penalty",
    "algorithm.eps_low": "epsilon clip_ratio cliprange clip_range clip_ratio_low ratio_clip_min eps_clip clip_eps",
    "algorithm.eps_high": "epsilon_high clip_ratio_high ratio_clip_max eps_clip_high",
    "data.files": "train train_file train_files train_data train_dataset "
    "dataset dataset_name dataset_path data_path prompt_data path",
    "data.prompt_field": "prompt prompt_key input_key question question_field problem",
    "data.gold_field": "gold answer answer_field answer_key label_key label solution ground_truth target",
    "evaluation.files": "val val_file val_files test_files eval_files eval_dataset validation",
    "evaluation.every_steps": "test_freq eval_steps eval_interval eval_every val_period",
    "checkpoint.every_steps": "save_freq save_steps save_interval save_period",
    "reward.kind": "reward_fn reward_funcs reward_function reward_model grader custom_reward_function",
    "rollout.rollouts_per_prompt": "num_generations num_generations_per_prompt n "
    "n_samples_per_prompt rollout_n group_size num_samples",
    "rollout.max_answer_tokens": "max_completion_length max_response_length max_new_tokens "
    "max_tokens response_length generate_max_len rollout_max_response_len",
    "rollout.max_prompt_tokens": "max_prompt_length prompt_max_len prompt_length",
    "training.prompts_per_step": "batch_size train_batch_size "
    "rollout_batch_size num_prompts_per_step per_device_train_batch_size",
    "training.prompts_per_update": "mini_batch_size ppo_mini_batch_size global_batch_size train_global_batch_size",
    "training.max_tokens_per_microbatch": "micro_batch_size ppo_max_token_len_per_gpu "
    "max_tokens_per_gpu max_token_len_per_gpu gradient_accumulation_steps",
    "logging.trackers": "report_to logger",
    "logging.project": "project_name wandb_project",
    "slurm.nodes": "nnodes num_nodes",
    "slurm.gpus_per_node": "n_gpus_per_node num_gpus_per_node gpus",
}
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    word: tuple(key for key, words in _WORDS.items() if word in words.split())
    for word in " ".join(_WORDS.values()).split()
}
