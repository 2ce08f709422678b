"""Exports an encoder in the forms that other libraries load; `export` has the table of the formats."""
