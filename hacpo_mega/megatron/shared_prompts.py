"""Prompts that several answers share: read once in a micro-batch, seen by each of the answers.

A segment of a pack (records.MicroBatch) may see the tokens of another one before its own. Keys and values are gathered
for it, prompt and answer end to end; queries stay as they are. So the matrices of a layer work on a prompt once for all
of its answers, and attention on its queries, too. The gradient of a key that several segments have met is their sum.
Not here: which answers share a prompt (samples/packing.py), and attention itself (layers.py).
Shapes: T tokens in S segments, M keys of all segments, K key/value heads, D head size.
"""

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.functional import embedding


@dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's description of a pack whose segments meet more keys than they have queries.

    key_places    int64 [M] on the device, the tokens whose keys they meet, segment after segment
    """

    key_places: torch.Tensor | None = None


def packed_segments(
    cu_seqlens: torch.Tensor, prefixes_S2: torch.Tensor | None, whole: torch.Tensor, device: torch.device
) -> PackedSegments:
    """How attention is told of the segments of a micro-batch; int32 on the CPU. `whole` is for the rotary embedding."""
    lengths_S = cu_seqlens.diff()
    keys_S, key_starts, places = lengths_S, cu_seqlens, None
    if prefixes_S2 is not None and bool(prefixes_S2.any()):
        places = _key_places(cu_seqlens, prefixes_S2).to(device, non_blocking=True)
        keys_S = lengths_S + prefixes_S2[:, 1]
        key_starts = torch.cat([keys_S.new_zeros(1), keys_S.cumsum(0).int()])
    return PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens.to(device, non_blocking=True),
        cu_seqlens_kv=key_starts.to(device, non_blocking=True),
        cu_seqlens_q_padded=whole,
        cu_seqlens_kv_padded=whole,
        max_seqlen_q=int(lengths_S.max()),
        max_seqlen_kv=int(keys_S.max()),
        key_places=places,
    )


def _key_places(cu_seqlens: torch.Tensor, prefixes_S2: torch.Tensor) -> torch.Tensor:
    """[M]: of every segment the tokens before its own, then its own."""
    starts = torch.stack([prefixes_S2[:, 0], cu_seqlens[:-1]], dim=1).flatten().long()
    lengths = torch.stack([prefixes_S2[:, 1], cu_seqlens.diff()], dim=1).flatten().long()
    ends = lengths.cumsum(0)
    return torch.arange(int(ends[-1])) + (starts - ends + lengths).repeat_interleave(lengths)


def gather_tokens(tensor_TKD: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The rows `places`, of any shape, of a tensor [T, K, D]: [*places, K, D]. Gradients of equal places add up."""
    # embedding: what index_select's gradient does on the CPU takes a call for every row.
    return embedding(places, tensor_TKD.flatten(1)).unflatten(-1, tensor_TKD.shape[1:])
