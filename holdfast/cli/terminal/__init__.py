"""What a terminal shows: lines of ranks, quantities, tracebacks, flame graphs."""
