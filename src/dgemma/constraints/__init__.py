"""Constraints on generated text: regular expressions, JSON schemas, choices, grammars and tool calls."""
