"""The diffusion process: the state of a canvas, predictions, decisions, noise, schedules and counter-based draws.

Read draws, schedule, noise, prediction, state and decision. The other files are for constraints (automaton, language,
paths, joint), log-probabilities of runs (law) and training (nelbo).
"""
