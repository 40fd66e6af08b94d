"""`hacpo-mega export`."""

from pathlib import Path
from typing import Annotated

import typer

from hacpo_mega.cli.start import Trust
from hacpo_mega.cluster.machine.environment import prepare_environment
from hacpo_mega.config.user_code import code_of_model, require_trust
from hacpo_mega.models.files.documents import short
from hacpo_mega.models.files.visible import say


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A finished run, or RUN/checkpoints/step_N, even while it goes on.")
    ],
    out: Annotated[Path, typer.Option(help="The new Hugging Face folder.")],
    agent: Annotated[str | None, typer.Option(help="Name; a run of one agent needs none.")] = None,
    quantize: Annotated[str | None, typer.Option(help="fp8 or nvfp4, by nvidia-modelopt, for vLLM.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16, of a checkpoint's float32 weights; else the run's."),
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the LoRA adapters, for peft.")] = False,
    text_only: Annotated[
        bool,
        typer.Option("--text-only", help="The text model alone, of an image checkpoint; so with --quantize."),
    ] = False,
    trust: Trust = False,
) -> None:
    """Write an agent of a run as a Hugging Face folder with a model card."""
    prepare_environment()
    from hacpo_mega.commands.export import as_folder, export_adapter, export_copy, trained_agent

    if adapter and quantize is not None:
        raise ValueError("--adapter and --quantize exclude each other: what is quantized is the merged model")
    if adapter and text_only:
        raise ValueError("--adapter and --text-only exclude each other: adapters are of the text model in any case")
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"--dtype {short(dtype)} is not known; there are: float32, bfloat16")
    if dtype is not None and quantize is not None:
        raise ValueError("--dtype and --quantize exclude each other: what is quantized is the model in the run's type")
    chosen = trained_agent(run, agent, trust=trust)
    if dtype is not None and chosen.stored is None:
        raise ValueError(
            f"--dtype is for a checkpoint: {chosen.folder} keeps the type of its export; give one of {run}/checkpoints"
        )
    if adapter:
        export_adapter(chosen, out, dtype)
    elif quantize is None:
        export_copy(chosen, out, dtype, text_only=text_only)
    else:
        require_trust(code_of_model(chosen.agent), chosen.file, trusted=trust)
        from hacpo_mega.commands.quantize import export_quantized

        with as_folder(chosen, out) as whole:
            export_quantized(whole, out, quantize)
    say(out)
