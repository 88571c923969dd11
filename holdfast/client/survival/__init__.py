"""Lets a rank outlive the process groups of its generation and go on in those of the next."""
