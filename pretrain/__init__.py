"""Puts pretraining jobs together."""
