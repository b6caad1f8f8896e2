"""Anthropic's Messages API: its request bodies, and the format of its responses."""
