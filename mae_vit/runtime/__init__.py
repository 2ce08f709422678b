"""mae_vit/runtime/__init__.py."""
