"""Writes images of many sources as webdataset shards."""
