"""`mae-vit prepare`."""
