"""Experiment trackers: TensorBoard, Weights & Biases, MLflow."""
