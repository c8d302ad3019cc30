"""Collectives that sequence parallelism needs; on an axis of one rank each is the identity."""
