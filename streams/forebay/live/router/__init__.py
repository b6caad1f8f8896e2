"""The router process, which owns groups or is their standby, as Faust assigns their partitions."""
