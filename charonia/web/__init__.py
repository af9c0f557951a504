"""The chat page with one command: `charonia web`."""
