"""Text and tokens: the tokenizer, chat templates, and the bytes of every token."""
