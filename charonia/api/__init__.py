"""The engine in Python: `Engine`, sampling parameters, results and their streams."""
