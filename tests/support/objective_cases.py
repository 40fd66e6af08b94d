"""Packed batches for the objective, and its loss and gradient by autograd in ten lines of float64."""

import torch
from kernel_cases import DEVICE

OPTIONS = {"eps_low": 3e-4, "eps_high": 4e-4, "delta": 0.2, "delta_step": 0.025, "alpha": 1.0, "log_ratio_clamp": 20.0}


def oracle(token_logprob, lengths, source, advantage, is_self, update_index, options, denominators=None):
    """Loss per sequence and gradient per token, sequence by sequence, by autograd in float64."""
    tokens = token_logprob.detach().cpu().double().requires_grad_()
    low = min(1.0, 1.0 - options["delta"] + update_index * options["delta_step"])
    losses = []
    for b, segment in enumerate(tokens.split(lengths)):
        if lengths[b] == 0:
            losses.append(tokens.sum() * 0.0)
            continue
        mean = segment.sum() / (denominators[b] if denominators else lengths[b])
        bound = options["log_ratio_clamp"]
        s = (mean - source[b].item()).clamp(-bound, bound).exp()
        A = advantage[b].item()
        if is_self[b]:
            loss = -torch.minimum(s * A, s.clamp(1 - options["eps_low"], 1 + options["eps_high"]) * A)
        else:
            c = s.clamp(low, 1.0)
            loss = -c * c.detach() ** options["alpha"] * A
        losses.append(loss)
    loss_B = torch.stack(losses)
    loss_B.sum().backward()
    return loss_B.detach(), tokens.grad


def make_batch(lengths, *, dtype=torch.float64, seed=0, spread=0.15):
    """Tokens whose ratios fall on every side of every bound, none within rounding of one: there 1 is one."""
    generator = torch.Generator().manual_seed(seed)
    num_sequences = len(lengths)
    tokens = -torch.rand(sum(lengths), generator=generator, dtype=torch.float64).mul(3)
    mean = torch.stack([x.mean() if len(x) else x.sum() for x in tokens.split(lengths)])
    kind = torch.randint(0, 3, (num_sequences,), generator=generator)
    shift = torch.randn(num_sequences, generator=generator, dtype=torch.float64)
    source = mean - shift * torch.tensor([1e-6, 4e-4, spread], dtype=torch.float64)[kind]
    advantage = torch.randn(num_sequences, generator=generator, dtype=torch.float64)
    advantage[::7] = 0.0
    is_self = torch.rand(num_sequences, generator=generator) < 0.5
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return [x.to(DEVICE, dtype) for x in (tokens, source, advantage)] + [is_self.to(DEVICE), cu_seqlens]
