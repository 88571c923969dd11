"""Judges evidence about ranks and nodes: stacks, waits in collectives, and the results of probes."""
