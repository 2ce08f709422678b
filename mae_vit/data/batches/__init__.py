"""mae_vit/data/batches/__init__.py."""
