"""The built-in graders, one kind in each file; a reward function of the user's may be composed of these four."""

from hacpo_grading.graders.graders import arithmetic, exact, length_penalised, requiring_format

__all__ = ["arithmetic", "exact", "length_penalised", "requiring_format"]
