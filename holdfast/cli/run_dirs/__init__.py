"""Run directories: finding and locking one, asking its controller, removing leftovers."""
