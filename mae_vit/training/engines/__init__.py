"""mae_vit/training/engines/__init__.py."""
