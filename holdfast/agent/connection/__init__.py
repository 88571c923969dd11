"""The agent's link to its controller: how the agent dials, and the controller's clock."""
