"""The vision tower's layers between library products: norms and rotation of heads, attention, residual stream."""
