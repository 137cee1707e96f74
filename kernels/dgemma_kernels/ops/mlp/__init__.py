"""GeGLU and the dense MLP."""
