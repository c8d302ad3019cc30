"""Sequence-parallel attention: `ulysses(ring(kernel))`, exact forward and backward."""
