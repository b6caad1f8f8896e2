"""Read journals, the input events that the owner applied according to them, and snapshots from a log."""
