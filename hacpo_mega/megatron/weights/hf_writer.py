"""Files of a Hugging Face folder, written from whole tensors: weights in safetensors, and the files beside them.

Elsewhere: the source of the tensors (reshard.py, stored_state.py). Imports no Megatron.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hacpo_mega.cluster.watchdog import RunStopped
from hacpo_mega.megatron.weights.hf_reader import dtype_of
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.files.folder import copied_files, has_tower, named_ends, read_config, read_json, with_dtype
from hacpo_mega.models.files.hub import HubModel
from hacpo_mega.models.files.stacked_experts import stack_shapes, stacked_experts
from hacpo_mega.models.files.tokenizer_files import ID_KEYS, PLAIN_CLASSES, names_wrong_class
from hacpo_mega.models.files.weight_files import (
    INDEX,
    SINGLE,
    StoredTensor,
    stacks_experts,
    stacks_plainly,
    stored_tensors,
    text_name,
    tower_tensors,
    without_extra_layers,
)
from hacpo_mega.models.sharding.lora import PREFIX, Lora
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
    base: Path | None = None,
    file_bytes: int = FILE_BYTES,
    writes: bool = True,
) -> None:
    """Writes `tensors` (name, full tensor of its source's shape), which are `sources` in their order and in `dtype`.

    Experts of a family that stacks them are stacked. If `base` is an image checkpoint, the result is one, too, with the
    names and stacking of `base`, and its tower in a file of its own, byte by byte. Files are about `file_bytes` each. A
    process that does not write only iterates, since making the tensors is collective.
    """
    shapes = {source.name: source.shape for source in sources}
    stored = stored_tensors(base).values() if base is not None and has_tower(base) else ()
    if (plain := any(tensor.plain for tensor in stored) or stacks_plainly(shapes)) or stacks_experts(shapes):
        shapes = stack_shapes(shapes.items(), plain=plain)
        tensors, sources = stacked_experts(tensors, shapes, plain=plain), [Source(*one) for one in shapes.items()]
    tower = tower_tensors(base) if writes and stored else {}
    names = {text_name(tensor.name): tensor.name for tensor in stored}
    files = _plan_files(sources, dtype, file_bytes, has_more=bool(tower))
    for name, planned in files.items():
        taken = {}
        for _ in planned:
            tensor_name, tensor = next(tensors)
            if writes:
                taken[tensor_name] = tensor.cpu()
        if writes and planned:
            assert list(taken) == planned, (list(taken), planned)
            _save({names.get(name, name): tensor for name, tensor in taken.items()}, folder / name)
    assert next(tensors, None) is None, "a tensor is not in the plan"
    if writes and len(files) > 1:
        weight_map = {names.get(one, one): name for name, planned in files.items() for one in planned}
        total = sum(torch.Size(s.shape).numel() * dtype_of(s.name, dtype).itemsize for s in sources)
        if tower:
            _save(_read_tower(base, tower), folder / list(files)[-1])
            weight_map |= dict.fromkeys(tower, list(files)[-1])
            total += sum(stored.stop - stored.start for stored in tower.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _read_tower(base: Path, tower: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    """The tensors of an image checkpoint's tower by name, in the types in which they are stored."""
    with ExitStack() as stack:
        files = {stored.file for stored in tower.values()}
        opened = {file: stack.enter_context(safe_open(base / file, framework="pt")) for file in files}
        return {name: opened[stored.file].get_tensor(name) for name, stored in tower.items()}


def write_adapter(tensors: Mapping[str, torch.Tensor], lora: Lora, base: Path, folder: Path) -> None:
    """Fills a folder that peft loads on top of the model `base`: adapter_model.safetensors, adapter_config.json.

    Factors by peft's names: A [rank, inputs], B [outputs, rank]. In an image checkpoint the text model lies deeper, and
    layers of its tower have the same last names.
    """
    targets: str | list[str] = list(lora.targets)
    beside = _beside_experts(tensors)
    if has_tower(base):
        layers = f"{PREFIX}model.", f"{PREFIX}model.language_model."
        tensors = {name.replace(*layers): tensor for name, tensor in tensors.items()}
        targets = rf".*language_model\..*\.({'|'.join(lora.targets)})"
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
        "target_modules": targets,
        **({"target_parameters": beside} if beside else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _beside_experts(names: Iterable[str]) -> list[str]:
    """Weights of adapted matrices outside experts whose last name adapted experts have, too; one for all layers.

    peft silently applies such a name of `target_modules` to experts alone.
    """
    modules = sorted({re.sub(r"^.*\.layers\.\d+\.|\.lora_.*$", "", name) for name in names})
    of_experts = {module.rpartition(".")[2] for module in modules if ".experts." in module}
    return [f"{m}.weight" for m in modules if m.rpartition(".")[2] in of_experts and ".experts." not in m]


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Writes a safetensors file with the default mode: the library would make it readable by its owner alone."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode & 0o777)


def _plan_files(
    sources: Sequence[Source], dtype: torch.dtype, file_bytes: int, *, has_more: bool
) -> dict[str, list[str]]:
    """File name -> names of the tensors in it, in their order; with `has_more` a last file is left without any."""
    groups, size = [[]], 0
    for source in sources:
        source_bytes = torch.Size(source.shape).numel() * dtype_of(source.name, dtype).itemsize
        if groups[-1] and size + source_bytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(source.name)
        size += source_bytes
    groups += [[]] * has_more
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def copy_beside_weights(source: Path, out: Path, dtype: torch.dtype, *, text_only: bool = False) -> None:
    """Copies the files that readers of a model need beside its weights, and sets the new dtype in config.json.

    With `text_only` an image checkpoint becomes its text model: that one's config.json, and no file for images.
    """
    copy_files(copied_files(source, text_only=text_only), source, out)
    if names_wrong_class(out):  # else servers of the copy would make other tokens of a prompt
        described = out / "tokenizer_config.json"
        named = {**read_json(described), "tokenizer_class": PLAIN_CLASSES[1]}
        described.write_text(json.dumps(named, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    config = read_config(source)
    if text_only:
        config = {**config, **Architecture.from_folder(source).vllm_overrides}
    elif has_tower(source):
        config = read_json(source / "config.json")
    config = without_extra_layers(with_dtype(config, str(dtype).removeprefix("torch.")))
    config.pop("quantization_config", None)  # what was read packed is written plain
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
