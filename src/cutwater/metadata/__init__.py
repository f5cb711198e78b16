"""The metadata repository: the server around the order layer, and the stores of its decisions."""
