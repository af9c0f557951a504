"""`charonia serve`: starts Triton with its models and the gateway, watches them, and ends them in order."""
