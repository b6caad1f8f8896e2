"""Scale pools: the planner that decides sizes, and the supervisor that executes its decisions."""
