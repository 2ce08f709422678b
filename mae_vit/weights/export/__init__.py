"""Handing on: an encoder in the forms that other libraries load.

`writing` puts an export in place; `to_NAME.py` writes one form each and verifies it with
the library that will load it; `facts` and `card` tell people what it is.
"""
