"""Recovers from bad steps and damaged samples."""
