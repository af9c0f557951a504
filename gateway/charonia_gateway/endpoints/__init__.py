"""The Triton servers behind the gateway: where they are, which one a request goes to, what happens when one fails."""
