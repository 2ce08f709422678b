"""mae_vit/data/order/__init__.py."""
