"""The Checkpointer: its arguments, the state of models and optimizers, and restore."""
