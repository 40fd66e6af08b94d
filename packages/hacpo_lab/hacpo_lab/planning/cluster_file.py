"""A cluster as a TOML file describes it: nodes of equal devices, their links, and how much of them work can use.

    kind = "h100"      # a known kind (kinds.py); a key that is given beside it goes before the kind's
    nodes = 2

Without a kind every key is required, except those of [rates]. All problems are reported at once, a line each.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from hacpo_lab.planning.kinds import KINDS, KindName
from hacpo_mega.config.load import readable_problems
from hacpo_mega.config.tables.section import Count, Factor, Section
from hacpo_mega.models.files.documents import toml_file

# Bounds that no machine goes below or above, in any unit of this file.
Amount = Annotated[float, Field(strict=True, ge=1e-3, le=1e9)]
Used = Annotated[float, Field(strict=True, ge=1e-3, le=1.0)]
Hour = Annotated[float, Field(strict=True, ge=0.0, le=3600.0)]


class DeviceTable(Section):
    """One device."""

    memory_gib: Amount
    """GiB of memory that a process finds on it."""
    peak_tflops: Amount
    """Peak of dense matrix multiplication in the type that is trained in, 10^12 FLOP/s."""
    memory_gb_per_s: Amount
    """Bandwidth of its memory, 10^9 bytes per second."""
    max_requests: Count
    """Most requests that an engine runs at once where agents.vllm.max_num_seqs is not given."""


class LinksTable(Section):
    """The rates at which a device sends in one direction."""

    inside_gb_per_s: Amount
    """10^9 bytes per second to a device of the same node."""
    between_gb_per_s: Amount
    """10^9 bytes per second to a device of another node."""
    latency_us: Annotated[float, Field(strict=True, ge=0.0, le=1e9)]
    """Microseconds until the first byte of a message arrives."""


class HostTable(Section):
    """The host of a node."""

    memory_gib: Amount
    """GiB of memory of a node's host."""


class RatesTable(Section):
    """Shares of a device that work is seen to use, and needs of a host; all can be given (docs/guide/planning.md)."""

    learn: Used
    """Share of the peak in forward and backward."""
    score: Used
    """Share of the peak in a forward pass without gradients."""
    prefill: Used
    """Share of the peak while the engine reads prompts."""
    decode: Used
    """Share of the peak that an engine can reach while it answers, where the memory is not slower."""
    experts: Used
    """The part of these shares that a model with experts reaches, whose matrices are many and small."""
    memory: Used
    """Share of the memory's bandwidth."""
    link: Used
    """Share of a link's bandwidth."""
    learn_passes: Factor
    """Times that the activations kept for backward pass through memory in an update, beside the matrices' work."""
    score_passes: Factor
    """The same of a forward pass."""
    round_s: Hour
    """Seconds of the host for a token of all running answers: scheduler, launches, sampling."""
    request_s: Hour
    """Seconds of the host to take an answer's request in and to give the answer out."""
    token_s: Hour
    """Seconds of the host for every sampled token."""
    answer_s: Hour
    """Seconds to judge an answer, in one grading process."""
    batch_s: Hour
    """Seconds of the host to launch the forward of a micro-batch, and again its backward, where nothing hides them."""
    pool_s: Hour
    """Seconds of the host to unpack an answer of the lane, whoever learns from it."""
    view_s: Hour
    """Seconds of the host to turn another agent's answer into what a learner trains on, beside its tokens."""
    view_token_s: Hour
    """Seconds of the host for every token of such an answer, which is cut into the learner's own tokens."""
    publish_s: Hour
    """Seconds of a publication beside its bytes."""
    tensor_s: Hour
    """Seconds of the host for every tensor that is published."""
    step_s: Hour
    """Seconds of a step for logs and metrics."""


class Cluster(Section):
    """A cluster: `nodes` of `devices_per_node` equal devices."""

    kind: KindName | None = None
    """A known kind that says what is not given."""
    processor: Literal["cuda", "cpu"] = "cuda"
    """The kind of training: in bf16 with CUDA's kernels, or in float32 with the CPU's."""
    nodes: Count
    """Nodes of the cluster."""
    devices_per_node: Count
    """Devices of a node."""
    device: DeviceTable
    """One device."""
    links: LinksTable
    """The rates at which a device sends."""
    host: HostTable
    """The host of a node."""
    rates: RatesTable
    """The shares of them that work uses."""

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def on_cpu(self) -> bool:
        """Tells whether a device is a core of a CPU."""
        return self.processor == "cpu"

    def bytes_per_s(self, *, inside: bool) -> float:
        """The bandwidth that work gets of a link, in bytes per second of one device."""
        links = self.links
        return 1e9 * (links.inside_gb_per_s if inside else links.between_gb_per_s) * self.rates.link

    def memory_bytes_per_s(self) -> float:
        """The bandwidth that work gets of the memory of a device."""
        return 1e9 * self.device.memory_gb_per_s * self.rates.memory


def load_cluster(path: Path) -> Cluster:
    """The cluster of a file. ValueError, one line per problem, which names the file and what would be right."""
    given = toml_file(path, "a cluster's TOML file")
    kind = given.get("kind")
    is_known = isinstance(kind, str) and kind in KINDS
    on_cpu = given.get("processor") == "cpu"
    table = _completed(given, KINDS[kind] if is_known else {"rates": KINDS["cpu" if on_cpu else "h100"]["rates"]})
    try:
        return Cluster.model_validate(table)
    except ValidationError as error:
        lines = readable_problems(error, table, Cluster)
        if kind is not None and not is_known:  # what it would have said is not missing
            lines = [line for line in lines if not line.endswith("not given")]
        raise ValueError("\n".join(f"{path}: {_with_hint(line)}" for line in lines)) from error


def _completed(given: dict[str, Any], kind: Any) -> dict[str, Any]:
    """The file's keys, and the kind's where the file says nothing."""
    both = dict(given)
    for key, value in kind.items():
        own = given.get(key)
        if own is None:
            both[key] = value
        elif isinstance(value, dict) and isinstance(own, dict):
            both[key] = {**value, **own}
    return both


def _with_hint(line: str) -> str:
    key, _, complaint = line.partition(": ")
    if complaint != "required, not given":
        return line
    if key == "nodes":
        return f"{line}. Nearest: nodes = 1"
    table, _, name = key.partition(".")
    value = KINDS["h100"].get(table)
    says = f"whose {key} is {value[name]:g}" if name else "which says it"
    return f"{line}; without it nothing can be planned. Nearest: kind = 'h100', {says}"
