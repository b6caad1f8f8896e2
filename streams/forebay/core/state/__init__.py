"""State of a group's owner, one part per module: prefix index, load, fleet, queue, sessions, requests."""
