"""mae_vit/finetuning/comparison/report/__init__.py."""
