"""What the agent reads of the kernel: processes, memory, OOM kills."""
