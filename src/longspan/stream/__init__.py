"""Decoder layers run tile by tile of tokens, unmodified."""
