"""mae_vit/finetuning/config/__init__.py."""
