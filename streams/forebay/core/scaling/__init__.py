"""Sizes of pools: the planner's state, folded from the topic `scaling`, and the decision that follows from it."""
