"""Makes quantised weights with llm-compressor, which has an environment of its own."""
