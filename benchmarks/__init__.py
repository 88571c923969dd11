"""What holdfast costs and what it saves, measured; names starting with an underscore are parts, not benchmarks."""
