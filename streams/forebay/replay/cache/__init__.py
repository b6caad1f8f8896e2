"""The tree of prompt prefixes of recent requests, and the worker ranks that cache them."""
