"""mae_vit/data/prepare/sources/__init__.py."""
