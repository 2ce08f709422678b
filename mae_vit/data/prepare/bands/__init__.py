"""Options, conversion and statistics of images of bands."""
