"""Commands to a running system over HTTP: to its workers, and to what it routes by."""
