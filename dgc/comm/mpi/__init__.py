"""Messages between two ranks over MPI."""
