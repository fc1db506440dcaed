"""Every element of a gradient is sent, in 16 bits: half of the bytes of fp32, without a residual."""
