"""The built-in graders, a kind a file; these four are what a reward function of the user's is composed of."""

from hacpo_grading.graders.graders import arithmetic, exact, length_penalised, requiring_format

__all__ = ["arithmetic", "exact", "length_penalised", "requiring_format"]
