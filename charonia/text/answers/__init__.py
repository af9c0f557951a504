"""What a model's answer holds beside plain text: calls of tools, and reasoning.

`formats` describes how models write these, `parser` reads an answer by such a description, piece by piece. charonia
convert puts a copy of this package beside the Triton models that need it, so it imports nothing of charonia.
"""
