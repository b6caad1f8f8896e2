"""Stand-in for an OpenAI-compatible server of an engine: vLLM, SGLang, or one that has only OpenAI's API for texts.

It generates the tokens of a mock engine that serves the same model, has a block cache with KV events, and misbehaves
in the ways that `Faults` selects.
"""

from tests.harness.openai_server.server import OpenAiServer
from tests.harness.openai_server.settings import Faults, ServerSettings

__all__ = ["Faults", "OpenAiServer", "ServerSettings"]
