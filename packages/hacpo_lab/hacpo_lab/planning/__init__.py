"""What a configuration would take on machines that are not here: bytes, seconds, waiting, and which layout is even."""
