"""Standard benchmarks: dgemma as a model for lm-evaluation-harness, and small tasks for the models that ship."""
