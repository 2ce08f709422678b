"""mae_vit/training/outputs/trackers/__init__.py."""
