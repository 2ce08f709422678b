"""mae_vit/data/shards/__init__.py."""
