"""Encoders, masks, patches and encoder files."""
