"""Charonia and other engines on the CPU, against memory and each other: charonia benchmark peers."""
