"""Helpers of several commands: errors, terminals, clusters, recordings, pages."""
