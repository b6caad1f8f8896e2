"""Adapter of servers that already run: `vllm serve`, SGLang, or any other server with OpenAI's completions API."""
