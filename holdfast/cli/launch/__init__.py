"""From the command to a running job: supervisor, controller, hosts that join."""
