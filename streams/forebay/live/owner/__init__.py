"""The owner of a group: decides on requests, journals each decision, then acts on it."""
