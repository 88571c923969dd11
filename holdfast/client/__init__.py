"""What lives inside a rank, and the zygote and the store beside it."""
