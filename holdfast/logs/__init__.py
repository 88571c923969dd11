"""Reading logs, and the catalogs that say what their lines mean."""
