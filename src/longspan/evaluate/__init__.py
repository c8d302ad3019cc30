"""What a model can do with long rows, measured by sharded forward passes."""
