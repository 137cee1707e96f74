"""RMSNorm and the residual stream around a layer's products."""
