"""mae_vit/weights/__init__.py."""
