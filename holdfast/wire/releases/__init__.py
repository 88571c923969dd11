"""Releases of the user's code: the list of their files, archives, signatures, and staged copies."""
