"""The text of Charonia's demo model: what it is trained on and what it is asked to prove that it learned.

Plain Python without PyTorch, so that tests and benchmarks can import the questions and their checks.
"""
