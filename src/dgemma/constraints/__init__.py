"""Constraints on generated text: regular expressions, JSON schemas, choices, grammars and tool calls.

Start with `joint.py`.

languages         what users write: `Regex`, `JsonSchema`, ...; a pattern becomes an automaton over tokens (build)
run_language      a run's automaton, with stop tokens, and the state of each row
canvas_language   its part over one canvas, which is in the state of a step
joint             `condition` turns the prediction of a step into that of texts in the language (paths, automaton)
"""
