"""Features of many images, in order, saved as they come: what `mae-vit embed` does."""
