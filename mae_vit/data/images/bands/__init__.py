"""Reads images of any number of bands, of 8 and 16 bits and floating point."""
