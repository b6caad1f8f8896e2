"""Simple reference engine on the transformers library."""
