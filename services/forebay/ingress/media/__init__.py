"""Images and videos of requests: references, download limits, and their placeholder tokens."""
