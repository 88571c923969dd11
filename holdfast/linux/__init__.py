"""Linux features that Python has no call for."""
