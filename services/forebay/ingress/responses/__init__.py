"""OpenAI's Responses API: its request bodies, the items of a conversation, and the format of its responses."""
