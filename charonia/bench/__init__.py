"""Benchmarks: static (batch, prompt and output lengths, in process) and serving (a stream of requests, any target)."""
