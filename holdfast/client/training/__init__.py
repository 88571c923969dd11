"""The calls that a script makes while it trains: steps, losses, parallel groups, batches to skip."""
