"""Starts a rank, by fork from a zygote or by exec; makes it import its release. Also runs the TCPStore process."""
