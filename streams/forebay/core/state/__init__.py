"""What a group's owner knows, one fold per module: prefix index, load, fleet, queue, sessions, requests."""
