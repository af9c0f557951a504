"""OpenAI's batches: many requests in one file, and their answers in another."""
