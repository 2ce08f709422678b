"""mae_vit/finetuning/frozen/__init__.py."""
