"""State of a group's owner, one fold per module: prefix index, load, fleet, queue, sessions, requests."""
