"""A run: arguments become a plan, and the plan is carried out canvas by canvas. Start with `generate.py`."""
