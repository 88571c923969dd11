"""Starting a job: the supervisor, the controller's process, hosts that join."""
