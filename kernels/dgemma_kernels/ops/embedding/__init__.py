"""Token embedding, self-conditioning and the first norms."""
