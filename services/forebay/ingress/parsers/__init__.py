"""Split generated text into reasoning, content and tool calls."""
