"""Takes snapshots of a rank's state: finds the tensors, chooses their copy routes, and copies them on CPU or GPU."""
