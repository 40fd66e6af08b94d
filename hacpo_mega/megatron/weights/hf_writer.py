"""Files of a Hugging Face folder, written from whole tensors: weights in safetensors, and the files beside them.

Not here: the source of the tensors (reshard.py, stored_state.py). Imports no Megatron.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from hacpo_mega.cluster.watchdog import RunStopped
from hacpo_mega.megatron.weights.hf_reader import dtype_of
from hacpo_mega.models.files.folder import copied_files, named_ends, read_config, read_json, with_dtype
from hacpo_mega.models.files.hub import HubModel
from hacpo_mega.models.files.tokenizer_files import ID_KEYS
from hacpo_mega.models.files.weight_files import INDEX, SINGLE, without_extra_layers
from hacpo_mega.models.sharding.lora import Lora
from hacpo_mega.models.sharding.segments import Source

FILE_BYTES = 5 << 30
# Folder of the adapters beside the merged weights, in an exported agent with LoRA.
ADAPTER = "adapter"
GENERATION = "generation_config.json"


def finite(
    tensors: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype, out_folder: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Converts tensors of any shape to `dtype`. RunStopped for one that is not finite in it.

    Every process that takes the tensors checks them, so that all stop and none waits for the next bucket.
    """
    for name, tensor in tensors:
        converted = tensor.to(dtype_of(name, dtype))
        if num_bad := converted.numel() - int(converted.isfinite().sum()):
            raise RunStopped(
                f"{out_folder} is not written: {name} holds {num_bad} numbers that are not finite (NaN or infinite in "
                f"{str(converted.dtype).removeprefix('torch.')}) among {converted.numel()}"
            )
        yield name, converted


def write_weights(
    tensors: Iterator[tuple[str, torch.Tensor]],
    sources: Sequence[Source],
    folder: Path,
    dtype: torch.dtype,
    *,
    file_bytes: int = FILE_BYTES,
    writes: bool = True,
) -> None:
    """Writes `tensors` (name, full tensor of its source's shape), which are `sources` in their order and in `dtype`.

    Files are about `file_bytes` each. A process that does not write only iterates, since making the tensors is
    collective.
    """
    files = _plan_files(sources, dtype, file_bytes)
    for name, planned in files.items():
        taken = {}
        for _ in planned:
            tensor_name, tensor = next(tensors)
            if writes:
                taken[tensor_name] = tensor.cpu()
        if writes:
            assert list(taken) == planned, (list(taken), planned)
            _save(taken, folder / name)
    assert next(tensors, None) is None, "a tensor is not in the plan"
    if writes and len(files) > 1:
        weight_map = {tensor_name: name for name, planned in files.items() for tensor_name in planned}
        total = sum(torch.Size(s.shape).numel() * dtype_of(s.name, dtype).itemsize for s in sources)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_adapter(tensors: Mapping[str, torch.Tensor], lora: Lora, base: Path, folder: Path) -> None:
    """Fills a folder that peft loads on top of the model `base`: adapter_model.safetensors, adapter_config.json.

    Factors by peft's names: A [rank, inputs], B [outputs, rank].
    """
    _save(dict(tensors), folder / "adapter_model.safetensors")
    hub = HubModel.of_snapshot(base)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base) if hub is None else hub.repo,
        "revision": None if hub is None else hub.revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Writes a safetensors file with the default mode: the library would make it readable by its owner alone."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode & 0o777)


def _plan_files(sources: Sequence[Source], dtype: torch.dtype, file_bytes: int) -> dict[str, list[str]]:
    """File name -> names of the tensors in it, in their order."""
    groups, size = [[]], 0
    for source in sources:
        source_bytes = torch.Size(source.shape).numel() * dtype_of(source.name, dtype).itemsize
        if groups[-1] and size + source_bytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(source.name)
        size += source_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def copy_beside_weights(source: Path, out: Path, dtype: torch.dtype) -> None:
    """Copies the files that readers of a model need beside its weights, and sets the new dtype in config.json."""
    copy_files(copied_files(source), source, out)
    config = without_extra_layers(with_dtype(read_config(source), str(dtype).removeprefix("torch.")))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def name_end(folder: Path, number: int | None) -> None:
    """Adds a token to the end tokens in generation_config.json, so that servers of the folder stop there, too.

    None adds nothing. A folder without the file gets one, with the ids that config.json names.
    """
    if number is None:
        return
    file, config = folder / GENERATION, read_config(folder)
    named = {key: config[key] for key in ID_KEYS if config.get(key) is not None}
    content = dict(read_json(file)) if file.is_file() else named
    ends = list(dict.fromkeys((*named_ends(folder)[1], number)))
    file.write_text(json.dumps(content | {"eos_token_id": ends}, indent=2) + "\n")


def copy_files(files: Iterable[Path], source: Path, out: Path) -> None:
    """Copies files of `source` to the same places in `out`; existing ones stay."""
    for path in files:
        to = out / path.relative_to(source)
        if not to.exists():
            to.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, to)
