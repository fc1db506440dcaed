"""What every method needs: buckets, states, the interface of a compressor, the dense exchange, error feedback."""
