"""Compare the recorded history with another policy or configuration."""
