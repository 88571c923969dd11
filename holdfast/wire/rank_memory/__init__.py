"""Memory that a rank shares with its agent: its progress slot and its flight log, a writer and a reader of each."""
