"""The code that runs inside a rank, and the zygote and the TCPStore process beside it."""
