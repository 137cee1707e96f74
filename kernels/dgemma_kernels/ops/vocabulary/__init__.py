"""Statistics, samples and soft probabilities from the logits."""
