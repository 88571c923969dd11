"""Memory that a rank shares with its agent: its slot and its flight log, one module for each end."""
