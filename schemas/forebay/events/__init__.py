"""What was said: every fact, command and decision, and how each looks on the wire."""
