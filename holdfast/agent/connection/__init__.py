"""The agent's link to its controller: how it dials, and the controller's clock."""
