"""Tools to study a model: `observe` looks inside a forward pass, `sweep` compares samplers."""
