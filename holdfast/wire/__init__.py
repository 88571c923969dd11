"""Messages between client, agent and controller, and the shared memory through which a rank reports."""
