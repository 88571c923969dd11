"""Where nodes come from: one file for each kind of fleet."""
