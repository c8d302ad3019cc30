"""Measure: step times, memory, exchanges and attention, each only where it is seen to be right."""
