"""Benchmarks that need a checkout of the repository: charonia.bench.checkout has their commands."""
