"""Evaluation of one model on benchmark files: avg@k, best@k, pass@k and maj@k with intervals; every answer is kept.

benchmarks.py what is asked   evaluate.py the run   answers.py the files it leaves   scores.py statistics   table.py
"""
