"""Configurations whose data, grader, models or run folder are wrong, each with what must be said about it."""

from bad_case import NUM_ROWS, Case, one, with_files

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
        "an option's value",
        ("reward.kind=number", "reward.options={rel_tol=-1}"),
        ("reward.options: option rel_tol (-1) must be a number from 0, below 1",),
    ),
    one("no server", "reward.kind=model", "reward.options: 'model' needs url (an address that begins with http:// or"),
    Case(
        "a server of another kind",
        ("reward.kind=model", "reward.options={url='ftp://x', model='m'}"),
        ("reward.options: option url ('ftp://x') must be an address that begins with http:// or https://",),
    ),
    Case(
        "an option of no parameter",
        ("reward.kind='{here}/mine.py:grader'", "reward.options={bonus=0.1, foo=2}"),
        ("reward.options: '{here}/mine.py:grader' has no option foo; its parameters are: p, a, g, bonus",),
    ),
    one("no Python", "reward.kind='{here}/broken.py:f'", "{here}/broken.py is no Python source: "),
    one(
        "no arguments", "reward.kind='{here}/uncallable.py:none'", "none' takes (), and a grader is called with (prompt"
    ),
    one("four", "reward.kind='{here}/uncallable.py:four'", "four' takes (a, b, c, d), and a grader is called with"),
    one(
        "gold second", "reward.kind='{here}/uncallable.py:second'", "second' takes (said, ground_truth, scale=1), and a"
    ),
    one("a keyword", "reward.kind='{here}/uncallable.py:needs'", "takes (p, a, g, *, k), and a grader is called with"),
    one("no call", "reward.kind='{here}/uncallable.py:Bare'", "Bare' is a class without __call__, and a grader is"),
    one("a number", "reward.kind='{here}/uncallable.py:number'", "number is 3, and a function is needed"),
    one("a folder", "reward.kind='{here}/folder.py:f'", "the file {here}/folder.py is a folder, a pipe or a device"),
    one("no such module", "reward.kind='no_such_module:f'", "reward.kind: there is no module 'no_such_module'"),
    one("no such submodule", "reward.kind='hacpo_mega.no_such.module:f'", "no module 'hacpo_mega.no_such.module'"),
    one("a relative module", "reward.kind='.rewards:f'", "reward.kind: there is no module '.rewards'"),
    one(
        "not in the module",
        "reward.kind='hacpo_mega.grading.graders.math_grader:boxd'",
        "no function 'boxd'; did you mean 'boxed'",
    ),
]
SKILL_CASES = [
    one("unknown", "data.skills=['add', 'div']", "data.skills.1: must be 'add', 'sub', 'mul', 'srt', 'sum' or "
        "'chain', found 'div'"),
    one("none", "data.skills=[]", "data.skills: needs at least 1 of them, found []"),
    one("a text", "data.skills='add'", "data.skills: needs a list, found 'add'"),
    one("twice", "data.skills=['mul', 'add', 'mul']", "data.skills: mul is listed more than once. Nearest: ['mul', 'a"),
    one("a step that does not divide", "data.skills=['add', 'sub', 'srt']", "training.prompts_per_step (8) must be a "
        "multiple of the 3 skills of data.skills. Nearest: 12"),
    Case("a step beyond the data", ("data.skills=['mul']", "training.prompts_per_step=572"),
         ("training.prompts_per_step (572) takes more prompts of 'mul' than the 420 there are. Nearest: 420",)),
    one("fewer evaluation prompts than skills", "evaluation.num_prompts=3", "evaluation.num_prompts (3) is less than "
        "one prompt of each of the 4 skills. Nearest: 4"),
    one("more evaluation prompts than held out", "evaluation.num_prompts=604", "evaluation.num_prompts (604) takes "
        "more prompts of 'mul' than the 150 that are held out. Nearest: 600"),
    one("another generator", "data.generator='words'", "data.generator: must be 'arithmetic', found 'words'"),
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
    with_files("UTF-16", "files=['{here}/wide.jsonl']", "{here}/wide.jsonl is UTF-16 text; save it as UTF-8"),
    with_files("Zstandard", "files=['{here}/a.jsonl.zst']", "{here}/a.jsonl.zst is packed; unpack it, or pack"),
    with_files("Arrow", "files=['{here}/a.arrow']", "{here}/a.arrow is an Arrow file; give the folder that save_to_di"),
    with_files("a table", "files=['{here}/table.csv']", "{here}/table.csv is a table by its name; a run reads JSON Li"),
    with_files("no Parquet", "files=['{here}/text.parquet']", "{here}/text.parquet is no Parquet file, or a part of o"),
    with_files("cut Parquet", "files=['{here}/cut.parquet']", "{here}/cut.parquet is no Parquet file, or a part of on"),
    with_files("Parquet by another name", "files=['{here}/parquet.jsonl']", "{here}/parquet.jsonl is Parquet by its "
               "first bytes, not by its name. Nearest: {here}/parquet.parquet"),
    with_files("one field twice", "files=['{here}/good.jsonl'], gold_field='prompt'", "data.gold_field: 'prompt' is "
               "data.prompt_field, too; give the field that holds it alone"),
    with_files("a field of tools twice", "files=['{here}/good.jsonl'], tools_field='answer'", "data.tools_field: "
               "'answer' is data.gold_field, too; give the field that holds it alone", "data.tools_field: tools are"),
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
         ("rollout.max_prompt_tokens (5) leaves 0 of 6138 prompts of 'srt', and 4 are needed; the shortest has 6 "
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
