"""What processes say before they end, and what that means: a pure reading of lines, with knowledge handed in."""
