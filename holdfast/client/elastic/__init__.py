"""Pipelines whose layers may change hands: when workers fail or join, the others go on from the state they hold."""
