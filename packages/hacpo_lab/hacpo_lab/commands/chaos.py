"""The command `hacpo-mega chaos`: a run under random faults, held against the same run left alone.

Imports are inside the function, as in cli/app.py: `--help` must answer without torch.
"""

from pathlib import Path
from typing import Annotated

import typer

from hacpo_lab.chaos.faults import KINDS
from hacpo_lab.commands.ranks import train_rank
from hacpo_mega.cli.start import ConfigFile, Overrides
from hacpo_mega.cluster.machine.environment import prepare_environment
from hacpo_mega.config import load_config
from hacpo_mega.config.checks.input_checks import missing_models
from hacpo_mega.logbook.run.provenance import exported_steps
from hacpo_mega.models.files.visible import say

STALL_S = 30.0  # each stopped rank costs so long; the key's own default suits nodes that other jobs slow down


def chaos(
    config_file: ConfigFile,
    overrides: Overrides = None,
    faults: Annotated[int, typer.Option(min=0, help="How many faults strike over the run.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Kinds, ranks and moments are drawn from it.")] = 1,
    kinds: Annotated[str, typer.Option(help=f"Any of {', '.join(KINDS)}, with commas.")] = ",".join(KINDS),
    out: Annotated[Path, typer.Option(help="Folder of both runs and the table; a campaign in it goes on.")] = Path(
        "runs/chaos"
    ),
    undisturbed: Annotated[
        Path | None, typer.Option(metavar="RUN", help="The finished run to compare with; else it is made first.")
    ] = None,
) -> None:
    """Run under kills, stops, full disks and lack of memory; compare every bit with an undisturbed run.

    The key stall_s is 30 unless given.
    """
    chosen_kinds = tuple(kinds.split(","))
    if unknown := sorted(set(chosen_kinds) - set(KINDS)):
        raise ValueError(f"--kinds: {', '.join(unknown)} is not known. Known: {', '.join(KINDS)}")
    given = list(overrides or [])
    if not any(item.startswith("stall_s=") for item in given):
        given.append(f"stall_s={STALL_S}")
    config = load_config(config_file, [*given, f"run_dir={out / 'run'}"])
    if missing := missing_models(config):
        raise ValueError("\n".join(missing))
    if undisturbed is not None and exported_steps(undisturbed) != config.num_steps:
        raise ValueError(f"--undisturbed: {undisturbed} is no finished run of {config.num_steps} steps; leave it out")
    prepare_environment()
    from hacpo_lab.chaos.campaign import Campaign, ChaosError
    from hacpo_lab.chaos.table import write_table
    from hacpo_lab.chaos.verdict import compare
    from hacpo_mega.logbook.run.run_lock import RunLock

    campaign = Campaign(config, out, faults, seed, chosen_kinds, train_rank)
    reference = undisturbed or out / "undisturbed"
    with RunLock(out, "--out"):
        campaign.require_same()
        try:
            campaign.run_undisturbed(reference)
            for attempt in campaign.run_under_faults():
                write_table(out, campaign.attempts(), config.run_dir, None)
                say(attempt)
        except ChaosError as error:
            say(error)
            raise typer.Exit(1) from None
        verdict = compare(config.run_dir, reference, config)
        attempts = campaign.attempts()
        say(write_table(out, attempts, config.run_dir, verdict))
        if (num_struck := sum(len(attempt.struck) for attempt in attempts)) < faults:
            say(f"the run was over when {num_struck} of {faults} faults had struck: give it more num_steps")
    if verdict.problems:
        raise typer.Exit(1)
