"""Actuators: they execute the planner's decisions with local processes or with Kubernetes."""
