"""`forebay console`: a web page that shows a log, live or at any moment of the past."""
