"""The router process: owner of the groups whose control partitions Faust assigns to it, and standby of the others."""
