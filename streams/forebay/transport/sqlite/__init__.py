"""The port `Log` on one SQLite file: the embedded log."""
