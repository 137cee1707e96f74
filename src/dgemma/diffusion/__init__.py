"""The diffusion process: state of a canvas, predictions about it, noise, schedules and counter-based draws."""
