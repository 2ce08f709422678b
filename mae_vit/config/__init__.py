"""mae_vit/config/__init__.py."""
