"""What clients send and get, by OpenAI's definition of it."""
