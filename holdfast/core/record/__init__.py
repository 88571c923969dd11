"""The account of every second, the report, and what hooks are told."""
