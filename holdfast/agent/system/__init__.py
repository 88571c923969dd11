"""Child processes of the holder, and what the kernel reports about processes, memory and OOM kills."""
