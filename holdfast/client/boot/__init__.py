"""Starts a rank, forked from a zygote or executed, with the imports of its release; also the TCPStore process."""
