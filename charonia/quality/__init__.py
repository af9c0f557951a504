"""Measures the quality of a model: perplexity, difference from the 16-bit model, and correct answers."""
