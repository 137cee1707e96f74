"""The diffusion process: the state of a canvas, predictions, decisions, noise, schedules and counter-based draws.

canvas    the positions that are denoised together; a text has one after the other
block     a finished canvas; also the number of a canvas in its text
open      a position that is still to decide; writing closes it
frozen    a position that never changes
write     put a token on the canvas; a record calls what was written `accepted`
renoise   return a position to noise
draft     the tokens that the text would get if the canvas ended now
commit    of a position: write its token and close it; of a canvas: end it, and its draft joins the text
level     1 - α, the share of noise; a schedule maps the time to α
"""
