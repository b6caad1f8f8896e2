"""Records on the topic `dead-letters`: list them, show one, and append one to its topic again."""
