"""The Kafka API: requests from `openai-requests`, responses to `openai-responses`."""
