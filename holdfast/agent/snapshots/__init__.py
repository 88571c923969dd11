"""Snapshots of a node's ranks: kept in memory, sent to peers, combined into parity, written to storage."""
