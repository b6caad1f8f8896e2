"""Model cards on the topic `models`: store one, and list them."""
