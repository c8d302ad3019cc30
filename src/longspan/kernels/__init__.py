"""Attention kernels behind one protocol; each file knows one vendor's signatures."""
