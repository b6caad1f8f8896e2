"""Read the journal of the planner: status, history and explanations of scaling decisions, each derived again."""
