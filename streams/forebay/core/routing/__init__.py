"""Select a worker rank for a request: eligibility, cost, policy, and the plan of its stages."""
