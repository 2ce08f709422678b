"""The outputs of a run: its folder, metrics, plan and trackers."""
