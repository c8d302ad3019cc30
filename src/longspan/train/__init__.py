"""Training runs: data, the loop, its records and the saved model."""
