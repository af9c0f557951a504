"""`charonia web`: serves the chat page with one command."""
