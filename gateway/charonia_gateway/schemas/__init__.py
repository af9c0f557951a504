"""Request and response bodies, as OpenAI defines them."""
