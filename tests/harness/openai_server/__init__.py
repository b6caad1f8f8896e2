"""Stand-in for an OpenAI-compatible server of an engine: vLLM, SGLang, or one that has only OpenAI's API for texts.

It generates the tokens of a mock engine that serves the same model, has a block cache with KV events, and fails on
request. Run it with `python -m tests.harness.openai_server --help`, or in a test with `OpenAiServer`.
"""

from tests.harness.openai_server.server import OpenAiServer
from tests.harness.openai_server.settings import Counters, Faults, Flavor, ServerSettings

__all__ = ["Counters", "Faults", "Flavor", "OpenAiServer", "ServerSettings"]
