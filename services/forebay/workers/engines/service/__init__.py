"""Engines written by users: classes with `@service`, run as any other engine."""
