"""mae_vit/training/outputs/__init__.py."""
