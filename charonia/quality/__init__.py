"""What a model's weights and settings cost in quality: perplexity, distance from the 16-bit model, answers right."""
