"""The router process: owner of some groups, and standby of the others."""
