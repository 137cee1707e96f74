"""Each token's experts, and the (token, expert) pairs sorted into tiles."""
