"""Output of a run: terminal, TensorBoard, summary, and a CSV file per rank."""
