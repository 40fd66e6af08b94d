"""Configurations whose values are wrong, each with what must be said about it."""

from bad_case import Case, one

FINITE = (
    ("algorithm", ("alpha", "delta", "delta_step", "eps_low", "eps_high", "kl_coef", "log_ratio_clamp")),
    ("algorithm", ("advantage_eps", "capability_floor")),
    ("rollout", ("temperature",)),
    ("reward", ("timeout_s",)),
    ("agents.a.optimizer", ("lr", "eps", "weight_decay", "clip_grad", "min_lr_ratio")),
)
NOT_FINITE = [
    one(
        f"{section}.{key}={value}", f"{section}.{key}={value}", f"{section}.{key}: needs a finite number, found {value}"
    )
    for section, keys in FINITE
    for key in keys
    for value in ("inf", "nan")
]
WHOLE = ("num_steps", "seed", "lanes", "agents.a.tp", "training.prompts_per_step", "rollout.max_answer_tokens")
NOT_WHOLE = [
    one(f"{key}={value}", f"{key}={value}", f"{key}: needs a whole number, found {found}")
    for key in (*WHOLE, "algorithm.capability_window", "evaluation.every_steps")
    for value, found in (("true", "True"), ("2.0", "2.0"), ("'2'", "'2'"))
]
NOT_TRUE = [
    one(f"{key}={value}", f"{key}={value}", f"{key}: needs true or false, found {found}")
    for key in ("algorithm.eos_in_loss", "reward.require_stop", "agents.a.chat_template")
    for value, found in (("1", "1"), ("'true'", "'true'"))
]
OUT_OF_BOUNDS = [
    one(override, override, f"{override.partition('=')[0]}{says}")
    for override, says in (
        ("agents.a.optimizer.lr=1e10", ": input should be less than or equal to 1, found 10000000000.0. Nearest: 1"),
        ("agents.a.optimizer.lr=0.0", ": input should be greater than 0, found 0.0; the default is 1e-06"),
        ("agents.a.optimizer.lr=-1e-6", ": input should be greater than 0, found -1e-06"),
        ("agents.a.optimizer.betas=[2.0, 0.9]", ".0: input should be less than 1, found 2.0"),
        ("agents.a.optimizer.betas=[0.9, 1.0]", ".1: input should be less than 1, found 1.0"),
        ("agents.a.optimizer.betas=[0.9, nan]", ".1: needs a finite number, found nan"),
        ("agents.a.optimizer.betas=[0.9]", ".1: required, not given"),
        (
            "agents.a.optimizer.weight_decay=-0.1",
            ": input should be greater than or equal to 0, found -0.1. Nearest: 0",
        ),
        ("agents.a.optimizer.min_lr_ratio=2", ": input should be less than or equal to 1, found 2. Nearest: 1"),
        ("agents.a.optimizer.warmup_updates=-1", ": input should be greater than or equal to 0, found -1. Nearest: 0"),
        ("algorithm.eps_low=2.0", ": input should be less than 1, found 2.0; the default is 0.0003"),
        ("algorithm.eps_low=1.0", ": input should be less than 1, found 1.0"),
        ("algorithm.delta=1.5", ": input should be less than or equal to 1, found 1.5. Nearest: 1"),
        ("algorithm.delta_step=2.0", ": input should be less than or equal to 1, found 2.0. Nearest: 1"),
        ("algorithm.alpha=-1.0", ": input should be greater than or equal to 0, found -1.0. Nearest: 0"),
        ("algorithm.capability_window=0", ": input should be greater than or equal to 1, found 0. Nearest: 1"),
        (
            "algorithm.capability_floor=0.0",
            ": input should be greater than or equal to 0.000000000001, found 0.0. Nearest: 1e-12",
        ),
        ("algorithm.log_ratio_clamp=100.0", ": input should be less than or equal to 80, found 100.0. Nearest: 80"),
        ("algorithm.omega_clip=[0.1, inf]", ".1: needs a finite number, found inf"),
        ("rollout.temperature=0.0", ": input should be greater than or equal to 0.01, found 0.0. Nearest: 0.01"),
        ("rollout.temperature=3.0", ": input should be less than or equal to 2, found 3.0. Nearest: 2"),
        ("reward.timeout_s=1e9", ": input should be less than or equal to 3600, found 1000000000.0. Nearest: 3600"),
        ("reward.num_workers=0", ": input should be greater than or equal to 1, found 0. Nearest: 1"),
        ("seed=-1", ": input should be greater than or equal to 0, found -1. Nearest: 0"),
        (f"seed={2**32}", ": input should be less than 4294967296, found 4294967296; the default is 1"),
        (f"seed={2**63}", ": input should be less than 4294967296, found 9223372036854775808"),
        ("num_steps=0", ": input should be greater than or equal to 1, found 0. Nearest: 1"),
        (f"num_steps={10**12}", ": input should be less than 2147483648, found 1000000000000"),
        ("lanes=0", ": input should be greater than or equal to 1, found 0. Nearest: 1"),
        ("agents.b.tp=-1", ": input should be greater than or equal to 1, found -1. Nearest: 1"),
        ("evaluation.every_steps=-1", ": input should be greater than or equal to 0, found -1. Nearest: 0"),
    )
]
NAMES = [
    one("an unknown table", "rolout.temperature=1.0", "rolout: unknown key; did you mean 'rollout'?"),
    one("an unknown key", "rollout.temprature=1.0", "rollout.temprature: unknown key; did you mean 'temperature'?"),
    one("an old key", "data.answer_field='x'", "data.answer_field: unknown key"),
    one("a preset", "algorithm.preset='papr'", "algorithm.preset: must be 'paper' or 'authors', found 'papr'; did you"),
    one("a preset of a list", "algorithm.preset=['paper']", "algorithm.preset: must be 'paper' or 'authors', found ["),
    one("a method", "algorithm.method='grp'", "found 'grp'; did you mean 'grpo'?"),
    Case(
        "an option of another method",
        ("algorithm.method=gspo", "algorithm.alpha=3.0"),
        ("algorithm: alpha = 3.0: method 'gspo' does not read it. Leave it out, or choose a method that does: hacpo",),
    ),
    one(
        "answers of a KL that there is not",
        "algorithm.kl_on='all'",
        "algorithm: kl_on = 'all': not read beside kl_coef = 0.0. Leave one out",
    ),
    one("a rival's option", "algorithm.ratio_cap=3.0", "algorithm: ratio_cap = 3.0: method 'hacpo' does not read it"),
    Case(
        "an update that does not halve",
        ("algorithm.method=gspo_x2", "training.prompts_per_update=1", "training.prompts_per_step=4"),
        (
            "training.prompts_per_update (1) must be a multiple of lanes x cells_per_lane of agent a x 2 of method "
            "'gspo_x2' (1 x 1 x 2 = 2). Nearest: 2",
            "of agent b x 2 of method",
        ),
    ),
    Case(
        "a score that others wait for",
        ("training.score_in_first_update=true", "rollout.engine_correction=token"),
        (
            "training.score_in_first_update: the 2 agents need each other's scores before they learn by 'hacpo'",
            "rollout.engine_correction = 'token' needs the scores before an update. Nearest: false",
        ),
    ),
    Case(
        "an engine's log-probs under a clip narrower than bf16 rounds",
        ("training.score_in_first_update=true", "rollout.engine_correction=ratio", "device_memory_gib=80"),
        (
            "training.score_in_first_update: the 2 agents need each other's scores",
            "rollout.engine_correction = 'ratio' takes the engine's log-probs. Nearest: false",
            "rollout.engine_correction: 'ratio' needs a wider own clip. algorithm.eps_low = 0.0003, eps_high = 0.0004: "
            "rounding in bf16 moves ratios of short answers of a, b further, to and from the engine. Nearest: "
            "algorithm.eps_low = 0.01 and algorithm.eps_high = 0.01, or 'none'",
        ),
    ),
    Case(
        "answers of the next step",
        (
            "rollout.one_step_off=true",
            "placement='shared'",
            "rollout.engine_correction=token",
            "training.score_in_first_update=true",
            "reward.while_sampling=true",
            "agents.a.offload='optimizer'",
        ),
        (
            "training.score_in_first_update: the 2 agents need each other's scores",
            "training.score_in_first_update: rollout.engine_correction = 'token' needs the scores",
            "training.score_in_first_update: with rollout.one_step_off the first update learns from another policy",
            "rollout.one_step_off: with placement = 'shared' nothing of an agent is on the device",
            "rollout.engine_correction: 'token' corrects the ratio to the trainer's log-probs",
            "reward.while_sampling: with rollout.one_step_off the answers that are sampled are not those of the step",
            "agents.a.offload: with rollout.one_step_off the engine is awake while the agent learns",
        ),
    ),
    Case(
        "engines of their own devices, and nobody says which",
        ("placement='apart'", "reward.while_sampling=true", "agents.b.rollout_gpus=3", "agents.b.engine_tp=2"),
        (
            "reward.while_sampling: with placement = 'apart' the process that judges has no engine",
            "agents.a.rollout_gpus: with placement = 'apart' its engines have devices of their own, and nobody",
            "agents.b: engine_tp (2) must divide rollout_gpus (3)",
        ),
    ),
    one(
        "devices for engines that have none",
        "agents.a.rollout_gpus=2",
        "agents.a.rollout_gpus (2): with placement = 'split' engines are on the devices that train. Nearest: placement",
    ),
    Case(
        "what never leaves",
        ("placement='apart'", "agents.*.rollout_gpus=1", "agents.a.offload='optimizer'"),
        ("agents.a.offload: with placement = 'apart' the actor shares its device with no engine",),
    ),
    Case(
        "an engine over ranks beside learning",
        ("rollout.one_step_off=true", "agents.a.tp=2", "agents.a.engine_tp=2"),
        ("rollout.one_step_off: an engine of agent a is over 2 ranks, whose collectives and those of learning could",),
    ),
    one("a schedule", "agents.a.optimizer.schedule='cos'", "agents.a.optimizer.schedule: must be 'constant', 'linear'"),
    one(
        "an agent's name", "agents.a.name='a b'", "name: needs letters, digits, - and _, a letter or digit first, found"
    ),
    one("an agent's name of metrics", "agents.a.name='phase'", "Nearest: 'agent_phase'"),
    one("an agent's name of a count", "agents.a.name='num_1'", "the name 'num_1' is a word of metric names, such as"),
    one("an agent's name twice", "agents.a.name='b'", "agents: the name 'b' occurs 2 times"),
    one(
        "every agent's value",
        "agents.*.tp='x'",
        "agents.a.tp: needs a whole number",
        "agents.b.tp: needs a whole number",
    ),
    one(
        "every agent's key", "agents.*.tpp=2", "agents.a.tpp: unknown key; did you mean 'tp'?", "agents.b.tpp: unknown"
    ),
    one("agents as a number", "agents=3", "agents: needs a list, found 3"),
    one("no agent", "agents=[]", "agents: needs at least 1 of them, found []"),
    one("an agent as a number", "agents=[3]", "agents.0: needs a table, found 3"),
    one("an agent without a model", "agents=[{name='a'}]", "agents.a.model: required, not given"),
    one("data as a number", "data=3", "data: needs a table, found 3"),
    one("algorithm as a list", "algorithm=[]", "algorithm: needs a table, found []"),
    one("reward as a text", "reward='math'", "reward: needs a table, found 'math'"),
    one("an optimizer as a number", "agents.a.optimizer=1", "agents.a.optimizer: needs a table, found 1"),
    one("omega", "algorithm.omega_clip=[2.0, 3.0]", "algorithm: omega_clip [2.0, 3.0]: needs 0 < low <= 1 <= high"),
    one("no equals sign", "seed", "override 'seed': expected section.key=value"),
    one("an unknown agent", "agents.c.tp=1", "override 'agents.c.tp=1': no entry is named 'c'; there are: a, b"),
    one("a part of a key", ".seed=1", "override '.seed=1': expected section.key=value"),
    one("no last part", "rollout.=1", "override 'rollout.=1': expected section.key=value"),
    one("none of two kinds", "agents.a.lora={targets='q'}", "agents.a.lora.targets: needs 'all-linear' or a list of"),
    one("an entry", "agents.a.lora={targets=[['q']]}", "list of at least one text, found [['q']]"),
    one(
        "none of four kinds",
        "reward.options={x=[1]}",
        "reward.options.x: needs true or false, a number or a text, found [1]",
    ),
    one(
        "memory", "slurm.mem='64GB'", "slurm.mem: needs a number of megabytes, or one with K, M, G or T behind it, such"
    ),
    one("a variable", "slurm.environment={'a-b'='x'}", "slurm.environment.a-b: needs letters, digits and _, no digit"),
    one("a part", "reward={parts={'Right'={}}}", "reward.parts.Right: needs at most 31 small letters, digits and _"),
    one("into a text", "agents.a.model.x=1", "override 'agents.a.model.x=1': leads into a str, not a table"),
    one("into all agents", "agents.tp=2", "leads into a list, not a table; write agents.*.tp=2, or a name for *"),
    one("a default as TOML has it", "logging.trace='yes'", "needs true or false, found 'yes'; the default is false"),
    one("into a number", "seed.x.y=1", "seed: needs a whole number, found {'x'"),
]
PASSED_ON = [
    one("nan for vllm", "agents.a.vllm.x=nan", "agents.a.vllm: needs finite numbers, found nan"),
    one("inf for Megatron", "agents.a.megatron.x=[1, {y=-inf}]", "agents.a.megatron: needs finite numbers, found -inf"),
    one("nan for the template", "agents.a.chat_template_kwargs.x=nan", "agents.a.chat_template_kwargs: needs finite"),
]  # fmt: skip
BATCHES = [
    one("updates", "training.prompts_per_step=10", "(10) must be a multiple of training.prompts_per_update (4). Neares",
        "training.prompts_per_step (10) must be a multiple of the 4 skills of data.skills. Nearest: 8 or 12"),
    one("cells", "agents.a.cells_per_lane=3", "(4) must be a multiple of lanes x cells_per_lane of agent a (1 x 3 = 3"),
    one("a micro-batch too small", "training.max_tokens_per_microbatch=19", "must hold one prompt and answer"),
    Case("a micro-batch of unequal parts", ("agents.a.tp=2", "agents.a.cp=2", "training.max_tokens_per_microbatch=258"),
         ("(258) must be a multiple of tp x cp of agent a (2 x 2 = 4). Nearest: 256 or 260",)),
    Case("an odd micro-batch", ("agents.a.tp=2", "training.max_tokens_per_microbatch=257"),
         ("training.max_tokens_per_microbatch (257) must be a multiple of tp of agent a (2). Nearest: 256 or 258",)),
]  # fmt: skip
INIT = "agents.a.init={family='qwen3',num_layers=1,hidden_size=32,num_heads=2,num_kv_heads=1,head_dim=32,ffn_size=64,"
INIT += "tied_embeddings=true,vocabulary=['0'],warm_start={skills={%s}}}"
WARM_STARTS = [
    one("no skill", INIT % "", "agents.a.init.warm_start.skills: "),
    one("an unknown skill", INIT % "div={share=1.0}", "agents.a.init.warm_start.skills.div: must be 'add', 'sub', '"),
    one("shares", INIT % "add={share=0.9}", "agents.a.init.warm_start: the shares of warm_start.skills add up to 0."),
    one("product by totals", INIT % "mul={share=1.0,totals=0.5}", "agents.a.init.warm_start.skills.mul.totals: who"),
    one("too many examples", INIT % "mul={share=1.0,num_examples=571}", "agents.a.init.warm_start.skills.mul."
        "num_examples (571) is more than there are. Nearest: 420"),
]  # fmt: skip
LOGGING = [
    one("an unknown tracker", "logging.trackers=['mlflo']", "logging.trackers.0: must be one of wandb, trackio"),
    one("no methods", "logging.trackers=['{here}/uncallable.py:Bare']", "Bare' has no log and no finish, wh"),
    one("no run", "logging.trackers=['{here}/uncallable.py:Alone']", "is made with 0 arguments, and is given"),
    one("no class", "logging.trackers=['{here}/uncallable.py:number']", "number is 3, and a class is need"),
    one("a maker", "logging.trackers=['{here}/uncallable.py:none']", "none' takes 0 arguments, and is given 1"),
    one("a project's name", "logging.project='a/b'", "logging.project: needs letters, digits, - and _, a letter or"),
    one("a step twice", "logging.trace_steps=[2,1,2]", "logging.trace_steps: [2, 1, 2] names one twice. Nearest: [2,"),
    Case("a step too late", ("logging={trace=true,trace_steps=[1,9]}",),
         ("logging.trace_steps: step 9 is after the last one (num_steps = 2). Nearest: [1]",)),
    Case("a step after the only one", ("num_steps=1", "logging={trace=true,trace_steps=[3]}"),
         ("logging.trace_steps: step 3 is after the last one (num_steps = 1). Nearest: [1]",)),
    one("no step", "logging.trace_steps=[]", "logging.trace_steps: "),
    one("a report of no step", "logging.report=0", "logging.report: needs 'end', 'never' or a number of steps "
        "from 1 on, found 0"),
    one("an adapter twice", "agents.a.lora={targets=['q_proj','v_proj','q_proj']}", "agents.a.lora.targets: ['q_proj', "
        "'v_proj', 'q_proj'] names one twice. Nearest: ['q_proj', 'v_proj']"),
]  # fmt: skip
