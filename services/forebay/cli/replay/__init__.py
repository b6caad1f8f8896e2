"""Decisions of a log: derived again, explained, compared, looked at in time."""
