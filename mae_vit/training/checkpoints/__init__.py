"""mae_vit/training/checkpoints/__init__.py."""
