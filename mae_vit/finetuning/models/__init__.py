"""mae_vit/finetuning/models/__init__.py."""
