"""`mae-vit embed`: computes features of many images in order, and saves them as it goes."""
