"""The diffusion process: the state of a canvas, predictions, decisions, noise, schedules and counter-based draws."""
