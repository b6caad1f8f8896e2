"""SGLang as an engine, by its own processes and messages."""
