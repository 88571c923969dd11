"""Releases of the user's code in a job."""
