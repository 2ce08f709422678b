"""mae_vit/models/__init__.py."""
