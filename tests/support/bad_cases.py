"""Configurations that are wrong, in groups, each with what must be said about it: one text per line, in order."""

from dataclasses import dataclass

NUM_ROWS = 12
ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(NUM_ROWS)]


@dataclass(frozen=True)
class Case:
    """`set` are overrides, `says` one text per line, `command` what is run; {here} is the folder of the fixture."""

    name: str
    set: tuple[str, ...]
    says: tuple[str, ...]
    command: tuple[str, ...] = ("check",)


def one(name: str, override: str, *says: str) -> Case:
    return Case(name, (override,), says)


def with_files(name: str, table: str, *says: str, command: tuple[str, ...] = ("check",)) -> Case:
    return Case(name, (f"data={{{table}}}",), says, command)


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
        "an engine over ranks beside learning",
        ("rollout.one_step_off=true", "agents.a.tp=2"),
        ("rollout.one_step_off: an engine of agent a is over 2 ranks, whose collectives and those of learning could",),
    ),
    one("a schedule", "agents.a.optimizer.schedule='cos'", "agents.a.optimizer.schedule: must be 'constant', 'linear'"),
    one(
        "an agent's name", "agents.a.name='a b'", "name: needs letters, digits, - and _, a letter or digit first, found"
    ),
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
    one("into a text", "agents.a.model.x=1", "override 'agents.a.model.x=1': leads into a str, not a table"),
    one("into a number", "seed.x.y=1", "seed: needs a whole number, found {'x'"),
]
PASSED_ON = [
    one("nan for vllm", "agents.a.vllm.x=nan", "agents.a.vllm: needs finite numbers, found nan"),
    one("inf for Megatron", "agents.a.megatron.x=[1, {y=-inf}]", "agents.a.megatron: needs finite numbers, found -inf"),
    one("nan for the template", "agents.a.chat_template_kwargs.x=nan", "agents.a.chat_template_kwargs: needs finite"),
]
REWARDS = [
    one(
        "a typo",
        "reward.kind='mth'",
        "reward.kind: 'mth' is unknown; known: math, math_any, number, choice, json, ",
    ),
    one("another typo", "reward.kind='math-any'", "did you mean 'math_any'?"),
    one("no kind", "reward.kind=''", "reward.kind: '' is unknown; known: "),
    one("no function", "reward.kind='math:'", "reward.kind: 'math:' is no grader; write module:function or file.py:"),
    one("no module", "reward.kind=':f'", "reward.kind: ':f' is no grader"),
    one(
        "no such file",
        "reward.kind='{here}/none.py:f'",
        "reward.kind: '{here}/none.py:f': the file {here}/none.py does",
    ),
    one(
        "no such function",
        "reward.kind='{here}/mine.py:gradee'",
        "{here}/mine.py has no function 'gradee'; did you mean",
    ),
    one("a local function", "reward.kind='{here}/mine.py:inner'", "{here}/mine.py has no function 'inner'"),
    Case(
        "an option of no grader",
        ("reward.kind=number", "reward.options={rel_tol=0.1, tol=1}"),
        ("reward.options: 'number' has no option tol; its options are: rel_tol, abs_tol; did you mean 'rel_tol'?",),
    ),
    Case(
        "an option of no parameter",
        ("reward.kind='{here}/mine.py:grader'", "reward.options={bonus=0.1, foo=2}"),
        ("reward.options: '{here}/mine.py:grader' has no option foo; its parameters are: p, a, g, bonus",),
    ),
    one("no Python", "reward.kind='{here}/broken.py:f'", "{here}/broken.py is no Python source: "),
    one("no such module", "reward.kind='no_such_module:f'", "reward.kind: there is no module 'no_such_module'"),
    one("no such submodule", "reward.kind='hacpo_mega.no_such.module:f'", "no module 'hacpo_mega.no_such.module'"),
    one("a relative module", "reward.kind='.rewards:f'", "reward.kind: there is no module '.rewards'"),
    one(
        "not in the module",
        "reward.kind='hacpo_mega.grading.math_grader:boxd'",
        "no function 'boxd'; did you mean 'boxed'",
    ),
]
SKILL_CASES = [
    one("unknown", "data.skills=['add', 'div']", "data.skills.1: must be 'add', 'sub', 'mul', 'srt' or 'sum', found "
        "'div'"),
    one("none", "data.skills=[]", "data.skills: needs at least 1 of them, found []"),
    one("a text", "data.skills='add'", "data.skills: needs a list, found 'add'"),
    one("twice", "data.skills=['mul', 'add', 'mul']", "data.skills: mul is listed more than once. Nearest: ['mul', 'a"),
    one("a step that does not divide", "data.skills=['add', 'sub', 'srt']", "training.prompts_per_step (8) must be a "
        "multiple of the 3 skills of data.skills. Nearest: 6 or 9"),
    Case("a step beyond the data", ("data.skills=['mul']", "training.prompts_per_step=572"),
         ("training.prompts_per_step (572) takes more prompts of 'mul' than the 570 there are. Nearest: 570",)),
    one("fewer evaluation prompts than skills", "evaluation.num_prompts=3", "evaluation.num_prompts (3) is less than "
        "one prompt of each of the 4 skills. Nearest: 4"),
    one("more evaluation prompts than held out", "evaluation.num_prompts=604", "evaluation.num_prompts (604) takes "
        "more prompts of 'mul' than the 150 that are held out. Nearest: 600"),
    one("another generator", "data.generator='words'", "data.generator: must be 'arithmetic', found 'words'"),
]  # fmt: skip
BATCHES = [
    one("updates", "training.prompts_per_step=10", "(10) must be a multiple of training.prompts_per_update (4). Neares",
        "training.prompts_per_step (10) must be a multiple of the 4 skills of data.skills. Nearest: 8 or 12"),
    one("cells", "agents.a.cells_per_lane=3", "(4) must be a multiple of lanes x cells_per_lane of agent a (1 x 3 = 3"),
    one("a micro-batch too small", "training.max_tokens_per_microbatch=19", "must hold one prompt and answer"),
    Case("an odd micro-batch", ("agents.a.tp=2", "training.max_tokens_per_microbatch=257"),
         ("training.max_tokens_per_microbatch (257) must be a multiple of tp of agent a (2). Nearest: 256 or 258",)),
]  # fmt: skip
FILES = [
    with_files("missing", "files=['{here}/none.jsonl']", "data.files: {here}/none.jsonl does not exist"),
    with_files("a folder", "files=['{here}/folder']", "{here}/folder is a folder; list its files. Nearest: {here}/fol"),
    with_files("a saved data set", "files=['{here}/saved']", "{here}/saved is a data set of splits; give one of them. "
               "Nearest: {here}/saved/train"),
    with_files("an empty folder", "files=['{here}/nothing']", "{here}/nothing is a folder; list its files"),
    with_files("empty", "files=['{here}/empty.jsonl']", "data.files: {here}/empty.jsonl is empty"),
    with_files("white", "files=['{here}/white.jsonl']", "data.files: {here}/white.jsonl is empty"),
    with_files("an array", "files=['{here}/array.json']", "{here}/array.json is a JSON array, needs one object per li"),
    with_files("no Parquet", "files=['{here}/text.parquet']", "{here}/text.parquet is no Parquet file, or a part of o"),
    with_files("cut Parquet", "files=['{here}/cut.parquet']", "{here}/cut.parquet is no Parquet file, or a part of on"),
    with_files("Parquet by another name", "files=['{here}/parquet.jsonl']", "{here}/parquet.jsonl is Parquet by its "
               "first bytes, not by its name. Nearest: {here}/parquet.parquet"),
    with_files("a wrong field", "files=['{here}/good.jsonl'], prompt_field='question'", "{here}/good.jsonl: the first "
               "row has no field 'question' (data.prompt_field); it has: prompt, answer"),
    with_files("two wrong fields", "files=['{here}/good.jsonl'], prompt_field='q', gold_field='a'",
               "no field 'q' (data.prompt_field) and no field 'a' (data.gold_field); it has: prompt, answer"),
    with_files("twice", "files=['{here}/good.jsonl', '{here}/good.jsonl']", "{here}/good.jsonl is listed before"),
    with_files("another spelling", "files=['{here}/good.jsonl', '{here}/folder/../good.jsonl']",
               "data.files: {here}/folder/../good.jsonl is listed before, as {here}/good.jsonl; list it once"),
    with_files("a link", "files=['{here}/good.jsonl', '{here}/link.jsonl']", "{here}/link.jsonl is listed before, as"),
    Case("trained and measured", ("data={files=['{here}/good.jsonl']}", "evaluation.files=['{here}/good.jsonl']"),
         ("evaluation.files: {here}/good.jsonl is also in data.files",)),
    Case("measured twice", ("evaluation.files=['{here}/good.jsonl', '{here}/link.jsonl']",),
         ("evaluation.files: {here}/link.jsonl is listed before, as {here}/good.jsonl; list it once",)),
    Case("a missing evaluation", ("evaluation.files=['{here}/none.jsonl']",), ("evaluation.files: {here}/none.jsonl",)),
    Case("no source", ("data={}",), ("data: give data.files or data.generator, exactly one of them",)),
    Case("two sources", ("data.files=['{here}/good.jsonl']",), ("data: give data.files or data.generator, exactly o",)),
    with_files("a long name", f"files=['{'x' * 300}.jsonl']", "data.files.0: needs a path of at most 4095 bytes, 255"),
    Case("arithmetic of files", ("data={files=['{here}/good.jsonl']}", "reward.kind='arithmetic'"),
         ("reward.kind = 'arithmetic' judges only data.generator = 'arithmetic'",)),
]  # fmt: skip
DATA = ("check", "--data")
ROW_CASES = [
    with_files("bad rows", "files=['{here}/rows.jsonl']", "{here}/rows.jsonl:2: field 'answer' is missing (the row has",
               "{here}/rows.jsonl:3: is a JSON list, needs an object", "{here}/rows.jsonl:4: invalid JSON: ",
               "{here}/rows.jsonl:5: field 'prompt' is the prompt of {here}/rows.jsonl:1 again", command=DATA),
    with_files("a Parquet column", "files=['{here}/one.parquet'], gold_field='gold'",
               *["field 'gold' is missing (the row has: answer, prompt)"] * NUM_ROWS, command=DATA),
    with_files("many bad rows", "files=['{here}/many.jsonl']", *["{here}/many.jsonl:"] * 20, "... and 9 more problems",
               command=DATA),
    Case("a prompt to train on and to measure on", ("data={files=['{here}/good.jsonl']}", "evaluation.files="
         "['{here}/same.jsonl']"), ("{here}/same.jsonl:1: field 'prompt' is the prompt of {here}/good.jsonl:4",), DATA),
    Case("a step beyond the rows", ("data={files=['{here}/good.jsonl']}", "training.prompts_per_step=16"),
         (f"but data.files has only {NUM_ROWS} rows. Nearest: {NUM_ROWS}",),
         DATA),
    Case("prompts all too long", ("data={files=['{here}/good.jsonl']}", "rollout.max_prompt_tokens=2"),
         ("rollout.max_prompt_tokens (2) leaves 0 of 12 prompts, and 8 are needed; the shortest has 4 tokens for some "
          "agent. Nearest: 4",), DATA),
    Case("prompts of a skill too long", ("data.skills=['mul', 'srt']", "rollout.max_prompt_tokens=5"),
         ("rollout.max_prompt_tokens (5) leaves 0 of 8010 prompts of 'srt', and 4 are needed; the shortest has 6 "
          "tokens for some agent. Nearest: 6",), DATA),
]  # fmt: skip
TOKENIZERS = [
    one("no tokenizer", "agents.a.model='{here}/bare'", "agents.a: model folder {here}/bare has no tokenizer (one of "),
    one(
        "tools",
        "data.tools_field='t'",
        "data.tools_field: tools are read by chat templates; set chat_template = true of a, b",
    ),
    one("no JSON", "agents.a.model='{here}/torn'", "agents.a: {here}/torn/tokenizer_config.json: not valid JSON: "),
    one("a list", "agents.a.model='{here}/listed'", "tokenizer_config.json: must hold a JSON object, found a list"),
    one(
        "no template", "agents.a.chat_template=true", "agents.a: chat_template = true, but {here}/a has none, neither "
    ),
    one(
        "arguments of none", "agents.a.chat_template_kwargs.x=1", "agents.a: chat_template_kwargs and system_prompt are"
    ),
    one(
        "a system prompt of none", "agents.a.system_prompt='Think.'", "agents.a: chat_template_kwargs and system_prompt"
    ),
    one(
        "a template without its place",
        "agents.a.prompt_template='Solve:'",
        "agents.a: prompt_template has {prompt} 0",
    ),
]
FOLDERS = [
    one("nothing", "run_dir=''", "run_dir: '.' is a folder around the current one; a run needs its own. Nearest: runs"),
    one("here", "run_dir='.'", "run_dir: '.' is a folder around the current one"),
    one("above", "run_dir='..'", "run_dir: '..' is a folder around the current one"),
    one("everything", "run_dir='/'", "run_dir: '/' is a folder around the current one"),
    one("a file", "run_dir='{here}/good.jsonl'", "cannot be made, since {here}/good.jsonl is a file. Nearest: {here}/"),
    one("under a file", "run_dir='{here}/good.jsonl/run'", "run_dir: {here}/good.jsonl/run cannot be made, since "),
    one("with a model in it", "run_dir='{here}/a'", "run_dir: {here}/a holds {here}/a of agents.a.model, and an old "
        "run folder is moved away before a run starts. Nearest: run_dir = '{here}/a.next'"),
    Case("with data in it", ("run_dir='{here}/folder'", "data={files=['{here}/folder/x.jsonl']}"),
         ("run_dir: {here}/folder holds {here}/folder/x.jsonl of data.files",)),
    one("a zero character", r'run_dir="a\u0000b"', "run_dir: needs a path of at most 4095 bytes, 255 in each part, wi"),
    one("a long name", f"run_dir='{'x' * 256}'", "run_dir: needs a path of at most 4095 bytes, 255 in each part"),
]  # fmt: skip
INIT = "agents.a.init={family='qwen3',num_layers=1,hidden_size=32,num_heads=2,num_kv_heads=1,head_dim=32,ffn_size=64,"
INIT += "tied_embeddings=true,vocabulary=['0'],warm_start={skills={%s}}}"
WARM_STARTS = [
    one("no skill", INIT % "", "agents.a.init.warm_start.skills: "),
    one("an unknown skill", INIT % "div={share=1.0}", "agents.a.init.warm_start.skills.div: must be 'add', 'sub', '"),
    one("shares", INIT % "add={share=0.9}", "agents.a.init.warm_start: the shares of warm_start.skills add up to 0."),
    one("too many examples", INIT % "mul={share=1.0,num_examples=571}", "agents.a.init.warm_start.skills.mul."
        "num_examples (571) is more than there are. Nearest: 570"),
]  # fmt: skip
LOGGING = [
    one("an unknown tracker", "logging.trackers=['mlflo']", "logging.trackers.0: must be one of wandb, trackio"),
    one("a project's name", "logging.project='a/b'", "logging.project: needs letters, digits, - and _, a letter or"),
    one("a step twice", "logging.trace_steps=[2,1,2]", "logging.trace_steps: [2, 1, 2] names one twice. Nearest: [2,"),
    Case("a step too late", ("logging={trace=true,trace_steps=[1,9]}",),
         ("logging.trace_steps: step 9 is after the last one (num_steps = 2). Nearest: [1]",)),
    Case("a step after the only one", ("num_steps=1", "logging={trace=true,trace_steps=[3]}"),
         ("logging.trace_steps: step 3 is after the last one (num_steps = 1). Nearest: [1]",)),
    one("no step", "logging.trace_steps=[]", "logging.trace_steps: "),
]  # fmt: skip
GROUPS = {
    "not finite": NOT_FINITE,
    "not whole": NOT_WHOLE,
    "not true or false": NOT_TRUE,
    "out of bounds": OUT_OF_BOUNDS,
    "names": NAMES,
    "passed on": PASSED_ON,
    "reward": REWARDS,
    "skills": SKILL_CASES,
    "batches": BATCHES,
    "files": FILES,
    "rows": ROW_CASES,
    "tokenizer": TOKENIZERS,
    "run folder": FOLDERS,
    "warm start": WARM_STARTS,
    "logging": LOGGING,
}
