"""The OpenAI-compatible HTTP API: server, routes, limits, admin API and responses."""

# Limits of request bodies, here because the help of commands needs them, and not the code that reads bodies.
TEXT_BYTES_MAX = 4 << 20  # a megatoken of English text
MEDIA_BYTES_MAX = 48 << 20  # far above 8 MiB of media in base64: the error of a larger image then names the image
