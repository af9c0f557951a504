"""The Python API: `Engine`, sampling parameters, results and streams."""
