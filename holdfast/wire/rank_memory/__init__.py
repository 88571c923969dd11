"""Memory that a rank shares with its agent: progress slot and flight log, each with a writer and a reader."""
