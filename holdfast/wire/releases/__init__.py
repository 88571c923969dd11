"""Releases of the user's code as files: which belong to one, archives, signatures, staged copies."""
