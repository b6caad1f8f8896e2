"""Adapter of the engine TensorRT-LLM, through its Python interface."""
