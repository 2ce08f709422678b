"""mae_vit/models/encoders/__init__.py."""
