"""Rules of routing: which ranks are eligible, what each costs, and how a policy selects one. They know no world."""
