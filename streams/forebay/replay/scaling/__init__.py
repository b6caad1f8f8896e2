"""Read the topic of the planner: its status and its decisions, each derived again and explained."""
