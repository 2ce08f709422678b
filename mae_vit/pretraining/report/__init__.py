"""The page of a pretraining run: `mae-vit report`."""
