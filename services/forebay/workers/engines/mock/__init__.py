"""The mock engine: modelled time, real KV bytes, words that depend on every byte."""
