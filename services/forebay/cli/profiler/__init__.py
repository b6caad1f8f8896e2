"""`forebay profile run`: measures a live worker for the planner and the simulator."""
