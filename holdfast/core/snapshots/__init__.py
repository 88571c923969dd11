"""Where state is: placement on peers, the newest step held by all, how a restart finds its state."""
