"""Messages between client, agent and controller, and the shared memory a rank reports through."""
