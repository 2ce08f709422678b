"""mae_vit/finetuning/results/__init__.py."""
