"""Where a job's state lies: copies on peers, the newest step that all hold, and the source of a restore."""
