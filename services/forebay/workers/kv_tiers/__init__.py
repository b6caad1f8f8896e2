"""KV blocks beyond device memory: their names, their files, and the stores that contain them."""
