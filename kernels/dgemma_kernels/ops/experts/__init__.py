"""The two products of the mixture of experts."""
