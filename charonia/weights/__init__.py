"""Model files: reads checkpoints, writes workspaces, and plans the memory that a model needs."""
