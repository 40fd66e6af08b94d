"""Evaluation of one model on benchmark files: avg@k, best@k, pass@k and maj@k with intervals; every answer is kept.

keys.py, settings.py, benchmarks.py what is asked   evaluate.py the run   answers.py its files   table.py scores
"""
