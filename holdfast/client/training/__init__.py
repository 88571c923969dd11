"""What a script tells and asks while it trains: steps, losses, groups, batches to skip."""
