"""Terminal output: the ranks' lines, quantities, tracebacks, flame graphs."""
