"""Exports an encoder in the forms that other libraries load.

`formats` has the table of the formats; `to_NAME.py` writes one each and loads it with the library that it is for;
`export` compares its outputs with ours and puts it in place; `card` describes it, `push` uploads it.
"""
