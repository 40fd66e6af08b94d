"""What a step costs: the same models under several schedules, on one machine, answer for answer the same work."""
