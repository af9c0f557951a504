"""Parses responses of models into text, reasoning and tool calls.

`formats` describes how models write reasoning and calls, `parser` parses text by such a description, and `reading`
parses the tokens of a response. The client library parses with it. preprocessing finds the formats of a chat template
with it: `charonia convert` copies the package next to that model, so it imports only the standard library.
"""
