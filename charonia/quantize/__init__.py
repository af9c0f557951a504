"""Quantises weights with llm-compressor, which runs in its own environment."""
