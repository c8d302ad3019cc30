"""Decisions made before anything runs."""
