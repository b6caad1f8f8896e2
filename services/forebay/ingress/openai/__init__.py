"""OpenAI request bodies and response objects, and the extensions that forebay serves."""
