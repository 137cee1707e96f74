"""Standard benchmarks: dgemma as a model of lm-evaluation-harness, and small tasks for the models that ship."""
