"""`hacpo-mega experiment GRID`: many runs as one resumable queue, and what they show when they are compared.

grid.py       the file of an experiment: regimes, methods, seeds, learning rates; a `Cell` is one run of it
identity.py   digests of what runs must have in common: configuration, warm starts, held-out prompts
order.py      which run comes next, and the learning rate that a method's tuning runs chose
result.py     one finished run as a small JSON file
trust.py      which files of a results folder may stand in one table
campaign.py   the queue: runs what is missing, one after the other
screen.py     what methods would have learnt from the answers of a run, without training
comparison.py means, deviations and bootstrap intervals of methods' runs
evidence.py   everything the results show, as records; table.py, curves.py and page.py render it
"""
