"""Lets a rank outlive the process groups of its generation and go on in the groups of the next one."""
