"""Commands that derive the decisions of a log again, to verify, explain and compare them, or show a past state."""
