"""Custom engines: classes with `@service`, run like any other engine."""
