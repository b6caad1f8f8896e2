"""The worker process: request life cycle, outbox, lease, commands, health and metrics."""
