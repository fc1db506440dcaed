"""Methods that send a few elements: DGC and top-k, their memories, selectors and payloads."""
