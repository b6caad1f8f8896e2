"""Services around the planner: actuators start and stop the workers of its pools."""
