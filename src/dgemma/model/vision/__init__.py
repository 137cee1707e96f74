"""Images: the vision tower, and the value that carries pixels from the image processor to `encode`."""
