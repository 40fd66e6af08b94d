"""The paper: HACPO (arXiv 2603.02604) as pure functions on tensors. No collectives, files, logging or tokenizers."""

from hacpo_mega.algorithm.advantage import hacpo_advantages
from hacpo_mega.algorithm.capability import CapabilityTracker

__all__ = ["CapabilityTracker", "hacpo_advantages"]
