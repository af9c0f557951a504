"""Charonia and other engines on the CPU, against memory and each other: python -m benchmarks.cpu_peers"""
