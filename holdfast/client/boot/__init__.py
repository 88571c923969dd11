"""Starts a rank, by fork from a zygote or by exec, and lets it import its release; also runs the TCPStore process."""
