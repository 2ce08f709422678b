"""Segmentation: `finetune.mode=segment` and `finetune.mode=segment_probe`."""
