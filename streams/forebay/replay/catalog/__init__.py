"""Catalog of a log: its requests, events of interest, metrics over time and checkpoints, in a file next to the log."""
