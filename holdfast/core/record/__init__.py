"""The record of a job: the account of every second, its releases, the report, and the notices for hooks."""
