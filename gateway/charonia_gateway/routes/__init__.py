"""HTTP routes: each module is a router."""
