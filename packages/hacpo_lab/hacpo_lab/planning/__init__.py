"""The demands of a configuration on machines that are not here: bytes, seconds, waiting, and which layout is even."""
