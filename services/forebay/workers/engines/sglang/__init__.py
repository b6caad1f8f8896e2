"""Adapter of the engine SGLang, which runs in its own processes."""
