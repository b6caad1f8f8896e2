"""Commands that serve: everything in one process, or one service per process."""
