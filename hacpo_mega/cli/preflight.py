"""The command `hacpo-mega preflight`: tests every node of a job before a model is loaded.

Imports are inside the function, as in cli/app.py: a node's report is made without torch.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hacpo_mega.cli.start import ConfigFile, Overrides, load_with_models
from hacpo_mega.cluster.launcher_env import LauncherEnv
from hacpo_mega.cluster.machine.environment import end_with_launcher, inside_a_job, prepare_environment
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.cluster.security.secret import forget_secret, share_secret
from hacpo_mega.logbook.run.provenance import installed_versions
from hacpo_mega.preflight.node_report import NodeReport, report_of


def preflight(
    config_file: ConfigFile,
    overrides: Overrides = None,
    wait: Annotated[float, typer.Option(min=1.0, help="Seconds after which missing processes are named.")] = 60.0,
) -> None:
    """Compare all nodes of a job and time its groups before a model is loaded; names the nodes that differ. Exit 5."""
    prepare_environment()
    if not inside_a_job():
        world_size = RankMap.of(load_with_models(config_file, overrides)).world_size
        from hacpo_mega.jobs.local import run_on_this_machine

        code = run_on_this_machine(sys.argv[1:], world_size)
    else:
        end_with_launcher()
        code = _take_part(config_file, overrides, wait)
    if code:
        raise typer.Exit(code)


def _take_part(config_file: Path, overrides: list[str] | None, wait_s: float) -> int:
    """The exit code of one rank. An error of the configuration is a finding: it may be right on the other nodes."""
    env = LauncherEnv.find()
    rank_map = run_dir = None
    report = NodeReport(env.node, env.rank, env.num_local)
    try:
        config = load_with_models(config_file, overrides)
    except ValueError as error:
        report = replace(report, problems=tuple(str(error).splitlines()))
    else:
        rank_map, run_dir = RankMap.of(config), config.run_dir
        _require_world_size(rank_map, env)
        share_secret(run_dir, wait_s)
        if env.is_first_of_node:
            report = report_of(env, config, installed_versions())
    from hacpo_mega.preflight.command import Preflight

    try:
        return Preflight(env, rank_map, run_dir, report, wait_s).run()
    finally:
        forget_secret()  # after a finding no process joins the job, where the secret would be forgotten


def _require_world_size(rank_map: RankMap, env: LauncherEnv) -> None:
    """ValueError on rank 0, exit code 2 on the others, since all ranks find the same number wrong."""
    try:
        rank_map.require_world_size(env.world_size)
    except ValueError:
        if env.rank == 0:
            raise
        raise typer.Exit(2) from None
