"""mae_vit/training/recovery/__init__.py."""
