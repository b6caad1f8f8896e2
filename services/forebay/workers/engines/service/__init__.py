"""Custom engines: run Python classes with the decorator `@service` like any other engine."""
