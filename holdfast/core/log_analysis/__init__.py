"""What logs say: lines, tracebacks, the catalog of failures, the root cause."""
