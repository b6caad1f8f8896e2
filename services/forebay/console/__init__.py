"""Console: a web page and an HTTP API that show a log, live or at any moment of the past."""
