"""mae_vit/data/images/__init__.py."""
