"""Run directories: finding one, locking one, asking its controller, removing what is left."""
