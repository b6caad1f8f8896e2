"""TensorRT-LLM as an engine, by its own Python interface."""
