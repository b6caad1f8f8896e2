"""Control a running system over HTTP: commands to workers, and routing settings."""
