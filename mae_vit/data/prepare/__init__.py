"""mae_vit/data/prepare/__init__.py."""
