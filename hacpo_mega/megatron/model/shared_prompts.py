"""Shared prompts: the prompt of several answers is read once in a micro-batch, and each answer attends to it.

A segment of a pack (records.MicroBatch) may attend to the tokens of another one before its own. Keys and values are
gathered for it, prompt and answer end to end; queries stay in place. So the matrices of a layer work on a prompt once
for all of its answers, and so does attention on its queries. The gradient of a key that several segments attend to is
their sum.

Elsewhere: which answers share a prompt (samples/packing.py), attention itself (attention.py).

Shapes: T tokens in S segments, M keys of all segments, K key/value heads, D head size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import embedding


@dataclass(frozen=True)
class Run:
    """Neighbouring segments of similar length, which attend as one padded batch.

    B segments, Q queries and M keys of the longest.
    lengths       tokens of each segment
    query_BQ      int64, places of their queries among those of the run; key_BM of their keys in the pack. A shorter
                  segment repeats its last query, which sees what that one sees, and its last key, which nobody sees
    is_query_BQ   bool, which of the queries are a segment's own
    back_BQM      int64, how many places before a query a key is; negative behind it
    The tensors are None if segments attend to their own keys alone.
    """

    lengths: list[int]
    query_BQ: torch.Tensor | None = None
    key_BM: torch.Tensor | None = None
    is_query_BQ: torch.Tensor | None = None
    back_BQM: torch.Tensor | None = None

    @staticmethod
    def prefixed(lengths: list[int], key_lengths: list[int], places: torch.Tensor) -> "Run":
        """Run of segments with keys of a prompt before their own.

        Each has `key_lengths` keys at `places` [M], of which the last `lengths` are its own.
        """
        own_B, keys_B = (torch.tensor(of_B, device=places.device) for of_B in (lengths, key_lengths))
        counting_Q, counting_M = (torch.arange(max(of_B), device=places.device) for of_B in (lengths, key_lengths))
        key_BM = (keys_B.cumsum(0) - keys_B)[:, None] + torch.minimum(counting_M, keys_B[:, None] - 1)
        own_BQ = torch.minimum(counting_Q, own_B[:, None] - 1)
        return Run(
            lengths,
            query_BQ=(own_B.cumsum(0) - own_B)[:, None] + own_BQ,
            key_BM=places[key_BM],
            is_query_BQ=counting_Q < own_B[:, None],
            back_BQM=(own_BQ + (keys_B - own_B)[:, None])[..., None] - counting_M,
        )


@dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's description of a pack, extended to segments with more keys than queries.

    key_places    int64 [M], the tokens whose keys they attend to, segment after segment; None: their own
    lengths       tokens of each segment, key_lengths keys: on the host, which must not wait for the device in a layer
    """

    key_places: torch.Tensor | None = None
    lengths: list[int] = field(default_factory=list)
    key_lengths: list[int] = field(default_factory=list)

    @cached_property
    def starts(self) -> torch.Tensor:
        """Places where segments begin, int64 [S + 1]: the same tensor for all layers and passes."""
        return self.cu_seqlens_q.long()

    @cached_property
    def runs(self) -> list[Run]:
        """All segments, in order, as runs; cached, since every layer uses the same."""
        runs, first_key = [], 0
        for group in similar_lengths(self.lengths, self.key_lengths):
            own, keys = [length for length, _ in group], [length for _, length in group]
            places = None if own == keys else self.key_places[first_key : first_key + sum(keys)]
            runs.append(Run(own) if places is None else Run.prefixed(own, keys, places))
            first_key += sum(keys)
        return runs


def similar_lengths(lengths: list[int], key_lengths: list[int]) -> list[list[tuple[int, int]]]:
    """Splits segments, with their numbers of tokens and keys, into runs of similar ones.

    In a run the longest is at most 1.5 times the shortest in both; segments with other keys than their own run apart.
    """
    runs: list[list[tuple[int, int]]] = []
    low = high = low_key = high_key = 0
    for own, keys in zip(lengths, key_lengths, strict=True):
        low, high = min(low, own), max(high, own)
        low_key, high_key = min(low_key, keys), max(high_key, keys)
        alike = runs and (own == keys) == (runs[-1][0][0] == runs[-1][0][1])
        if alike and 2 * high <= 3 * low and 2 * high_key <= 3 * low_key:
            runs[-1].append((own, keys))
        else:
            runs.append([(own, keys)])
            low, high, low_key, high_key = own, own, keys, keys
    return runs


def packed_segments(cu_seqlens: torch.Tensor, prefixes_S2: torch.Tensor | None) -> PackedSegments:
    """Segments of a micro-batch in the form that attention needs, on the CPU, where `forward_packed` sends them from.

    cu_seqlens [S + 1] and prefixes_S2 [S, 2] are int32 on the CPU.
    """
    lengths_S = cu_seqlens.diff()
    keys_S, key_starts, places = lengths_S, cu_seqlens, None
    if prefixes_S2 is not None and bool(prefixes_S2.any()):
        places = _key_places(cu_seqlens, prefixes_S2)
        keys_S = lengths_S + prefixes_S2[:, 1]
        key_starts = torch.cat([keys_S.new_zeros(1), keys_S.cumsum(0).int()])
    return PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=key_starts,
        max_seqlen_q=int(lengths_S.max()),
        max_seqlen_kv=int(keys_S.max()),
        key_places=places,
        lengths=lengths_S.tolist(),
        key_lengths=keys_S.tolist(),
    )


def _key_places(cu_seqlens: torch.Tensor, prefixes_S2: torch.Tensor) -> torch.Tensor:
    """Key places [M]: for every segment the tokens before its own, then its own."""
    starts = torch.stack([prefixes_S2[:, 0], cu_seqlens[:-1]], dim=1).flatten().long()
    lengths = torch.stack([prefixes_S2[:, 1], cu_seqlens.diff()], dim=1).flatten().long()
    ends = lengths.cumsum(0)
    return torch.arange(int(ends[-1])) + (starts - ends + lengths).repeat_interleave(lengths)


def gather_tokens(tensor_TKD: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rows `places`, of any shape, of a tensor [T, K, D]: [*places, K, D]. Gradients of equal places add up."""
    # embedding: index_select's gradient on the CPU takes a call for every row.
    return embedding(places, tensor_TKD.flatten(1)).unflatten(-1, tensor_TKD.shape[1:])


@contextmanager
def attended_tokens(
    tensors: Sequence[torch.Tensor], places: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, ...] | Sequence[torch.Tensor]]:
    """Context with the keys or values that segments attend to: rows `places` of tensors [T, K, D], or all (None).

    Backward keeps the T rows, and gathers them again: a prompt of 16,000 tokens that 16 answers share would be 256,000
    rows of every layer, which no limit of a micro-batch counts.
    """
    if places is None:
        yield tensors
        return
    gathered = tuple(gather_tokens(tensor, places) for tensor in tensors)
    of_storage = {
        tensor.untyped_storage()._cdata: source.detach() for tensor, source in zip(gathered, tensors, strict=True)
    }

    def pack(tensor: torch.Tensor) -> torch.Tensor | tuple:
        source = of_storage.get(tensor.untyped_storage()._cdata)
        if source is None:
            return tensor.detach()  # kept undetached, an output would keep itself alive
        return source, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(kept: torch.Tensor | tuple) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        source, *view = kept
        return gather_tokens(source, places).as_strided(*view)

    with saved_tensors_hooks(pack, unpack):
        yield gathered
