"""Pretraining jobs."""
