"""The cost of a step: the same models under several schedules, on one machine, answer for answer the same work."""
