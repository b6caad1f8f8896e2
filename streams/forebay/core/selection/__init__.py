"""Selection of pools and ranks for requests, from the state of the world and the rules in `forebay.core.routing`."""
