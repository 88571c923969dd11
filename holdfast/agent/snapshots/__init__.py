"""Snapshots of a node's ranks: kept in memory, sent to peers, laid over one another as parity, written to storage."""
