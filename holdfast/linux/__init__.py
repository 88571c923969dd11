"""What we ask of Linux that Python has no call for."""
