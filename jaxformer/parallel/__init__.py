"""The device mesh, the table from logical axis names to mesh axes, and communication between processes."""
