"""Readers of sources: folders, archives, tables, shards, downloads."""
