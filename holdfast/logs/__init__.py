"""Reads logs, and the catalogs that say what log lines mean."""
