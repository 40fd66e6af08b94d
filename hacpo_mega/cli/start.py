"""The start of commands: the checked configuration, its models, and the ranks that do the work.

Imports of what is heavy are inside functions, as in app.py.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from hacpo_mega.cluster.launcher_env import LauncherEnv, num_local, require_srun
from hacpo_mega.cluster.machine.environment import (
    compiles,
    end_with_launcher,
    inside_a_job,
    is_first_of_its_node,
    job_size,
    may_fork_ranks,
    prepare_environment,
    reads_first,
)
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.cluster.security.secret import share_secret
from hacpo_mega.config import Config, load_config
from hacpo_mega.config.checks.checks import find_problems
from hacpo_mega.config.checks.input_checks import missing_models
from hacpo_mega.config.load import load_unchecked
from hacpo_mega.models.files.hub import not_cached

ENGINE = "hacpo_mega.rollout.engine"
# A fifth of the time of all imports goes to packages that vLLM and transformers import only if they are installed, for
# audio and for boxes in images, and to the module of torch's compiler that vLLM patches. scikit-learn, which no lock
# names, is hidden with scipy: transformers imports it where it is installed, and it needs scipy.
UNUSED, COMPILER = ("scipy", "sklearn"), "torch._inductor.lowering"
# The arguments that name a configuration.
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's TOML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="agents.NAME.key=value, ...")]
# The options by which a run is started, here or by Slurm.
Fresh = Annotated[bool, typer.Option("--fresh", help="Start anew; what lies in run_dir moves aside.")]
Accept = Annotated[
    list[str] | None, typer.Option(metavar="KEY", help="A key that may differ from the run's that goes on.")
]
Branch = Annotated[
    Path | None, typer.Option("--from", metavar="STEP", help="RUN/checkpoints/step_N: a new run begins there.")
]
LastWhole = Annotated[bool, typer.Option("--last-whole", help="Move damaged checkpoints aside.")]
# The flag by which code that lies beside a model may run.
Trust = Annotated[bool, typer.Option("--trust", help="Run code that the run's configuration names; follow its links.")]


def load_checked(
    config_file: Path,
    overrides: list[str] | None,
    *,
    with_models: bool = False,
    before_download: Callable[[Config], object] = lambda config: None,
) -> Config:
    """The checked configuration.

    With `with_models` the models must exist: outside a job those of the Hub are downloaded, after `before_download` and
    all other checks have passed.
    """
    add_current_folder()
    with report_once_per_node():
        if with_models and not inside_a_job():
            fetch_agents(config_file, overrides or [], before_download)
        if not with_models:
            return load_config(config_file, overrides or [], try_templates=reads_first())
        return load_with_models(config_file, overrides, try_templates=reads_first())


def add_current_folder() -> None:
    """Adds the current folder to sys.path, for functions that a configuration names; last, so that it hides no module.

    Only for commands that run such functions: the current folder may be another user's.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


def load_with_models(config_file: Path, overrides: list[str] | None, *, try_templates: bool = True) -> Config:
    """The checked configuration, whose model folders exist."""
    config = load_config(config_file, overrides or [], try_templates=try_templates)
    if missing := missing_models(config):
        raise ValueError("\n".join(f"{config_file}: {problem}" for problem in missing))
    return config


def fetch_agents(config_file: Path, overrides: list[str], before_download: Callable[[Config], object]) -> None:
    """Downloads the models of agents that the cache lacks. ValueError first for everything that needs no download."""
    config = load_unchecked(config_file, overrides)
    to_come = models_to_download(config)
    if not to_come:
        return
    if problems := [*find_problems(config, to_come=to_come), *missing_models(config)]:
        raise ValueError("\n".join(f"{config_file}: {problem}" for problem in problems))
    before_download(config)
    fetch_missing(to_come.values())


def models_to_download(config: Config) -> dict[str, Path]:
    """The models of the Hub that the cache lacks, by agent."""
    return {agent.name: agent.model for agent in config.agents if agent.init is None and not_cached(agent.model)}


def fetch_missing(models: Iterable[Path]) -> None:
    """Downloads the models of the Hub that are not in the cache; the library is loaded only where there is one."""
    if any(map(not_cached, models := list(models))):
        from hacpo_mega.commands.fetch_models import fetch_models

        fetch_models(models)


@contextmanager
def report_once_per_node() -> Iterator[None]:
    """Raises a ValueError of the block only on the first process of each node, since all of a job find the same; the
    others exit with 2."""
    try:
        yield
    except ValueError:
        if is_first_of_its_node():
            raise
        raise typer.Exit(2) from None


@contextmanager
def hidden_modules(names: Iterable[str]) -> Iterator[None]:
    """Hides modules in the block, unless they are imported already, from libraries that can do without them."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turns garbage collection off in the block, and exempts its objects for good (gc.freeze).

    For imports of heavy libraries, whose two million objects live as long as the process. Python would traverse them
    again and again during the imports, and in each of the half a dozen collections that vLLM runs while an engine
    starts, half a second each.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def this_process_is_a_rank(config: Config, work: str, heavy: str = ENGINE) -> bool:
    """True inside a job. Outside, runs the whole job on this machine; then False, or exit with its code if not 0.

    `work` is the module that a rank runs, `heavy` the one below it that imports the largest libraries; both are
    imported when this returns True.
    """
    ranks = RankMap.of(config)
    if inside_a_job():
        with report_once_per_node():
            require_srun()
            ranks.require_world_size(job_size())
            ranks.require_one_node(num_local(job_size()))
            share_secret(config.run_dir, config.wait_s)
    return is_rank_of(ranks.world_size, work, heavy)


def is_rank_of(world_size: int, work: str, heavy: str = ENGINE) -> bool:
    """`this_process_is_a_rank` for a job of `world_size` ranks that has no configuration."""
    prepare_environment()
    if inside_a_job():
        LauncherEnv.find()  # missing variables are reported before the imports
        end_with_launcher()
        _import(heavy, work)
        return True
    from hacpo_mega.jobs.local import run_on_this_machine

    imports = partial(_import, heavy, work) if may_fork_ranks() else None
    code = run_on_this_machine(sys.argv[1:], world_size, imports=imports)
    if code:
        raise typer.Exit(code)
    return False


def _import(heavy: str, work: str) -> None:
    with no_garbage_collection():
        from hacpo_mega.cluster.machine.device import require_fitting_environment
    with report_once_per_node():
        require_fitting_environment()
    with no_garbage_collection():
        with hidden_modules(UNUSED if compiles() else (*UNUSED, COMPILER)):
            import_module(heavy)
        import_module(work)
