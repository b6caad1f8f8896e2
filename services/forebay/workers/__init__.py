"""Worker processes: they take work from the log, run it on an engine and append the results."""
