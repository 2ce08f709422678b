"""Pretrained weights: reading, loading, embedding, export."""
