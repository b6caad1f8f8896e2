"""Process that maintains the prefix index and the load of groups for other programs. It decides nothing."""
