"""A small engine of our own on transformers' models: what others are held against."""
