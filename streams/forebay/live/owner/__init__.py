"""The owner of a group, which decides requests, journals each decision, and then sends its effects."""
