"""HTTP in front of the node."""
