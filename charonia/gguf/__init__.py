"""GGUF files: their metadata, tensors, tokenizer and configuration, in the form of a Hugging Face folder."""
