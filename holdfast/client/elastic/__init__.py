"""Pipelines whose layers may change hands: when workers fail or come, the others go on from the state they hold."""
