"""Read recorded journals, the events that they consumed, and snapshots back from a log."""
