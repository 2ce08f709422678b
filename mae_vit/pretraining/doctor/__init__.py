"""mae_vit/pretraining/doctor/__init__.py."""
