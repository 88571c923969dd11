"""The Checkpointer: arguments, model and optimizer state, restore."""
