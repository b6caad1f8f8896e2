"""A router process: owns groups or stands by for them, as Faust assigns their partitions."""
