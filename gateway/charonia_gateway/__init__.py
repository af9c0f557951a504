"""OpenAI-compatible REST gateway: HTTP and server-sent events in front, Triton's gRPC behind."""

__version__ = "0.1.0"
