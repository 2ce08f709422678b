"""Self-supervised pretraining of Vision Transformers: MAE and masked patch prediction."""

__version__ = "0.1.0"
