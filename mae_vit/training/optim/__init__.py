"""mae_vit/training/optim/__init__.py."""
