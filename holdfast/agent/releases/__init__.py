"""Releases of the user's code on a node: staged, compiled, their imports checked."""
