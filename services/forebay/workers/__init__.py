"""Worker processes: they take work from the log, run it on an engine and append the results."""

PROCESSES_MAX = 256  # that one command starts
