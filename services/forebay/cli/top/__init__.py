"""`forebay top`: workers and requests of a system, in a terminal."""
