"""Mock engine: modelled step times, real KV bytes, output tokens that depend on every byte."""
