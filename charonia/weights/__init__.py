"""A model's files: checkpoints that are read, the workspace that they become, and what it needs of memory."""
