"""Images as webdataset shards: prepare, check, index, order, decode, augment, load."""
