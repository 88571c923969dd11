"""Log analysis: lines, tracebacks, the catalog of failures and the root cause."""
