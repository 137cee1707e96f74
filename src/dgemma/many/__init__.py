"""Many prompts through one model: a batch that is refilled, shared prefixes, and files that continue after a kill.

Start with `prompts.py`, then `batch.py`.
"""
