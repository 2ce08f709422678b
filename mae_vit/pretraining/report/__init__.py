"""mae_vit/pretraining/report/__init__.py."""
