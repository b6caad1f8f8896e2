"""Select a worker rank for each stage of a request: which ranks are eligible, their costs, and the policy."""
