"""Exports an encoder to other libraries' formats, which `export` lists."""
