"""The embedded log: the port `Log` on one SQLite file."""
