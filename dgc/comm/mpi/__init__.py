"""Point-to-point messages over MPI."""
