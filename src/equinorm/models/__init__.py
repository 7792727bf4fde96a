"""What methods need of a user's model: its inputs, modes and wrappers, its layers, its graph, and surgery on it."""
