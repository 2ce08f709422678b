"""The encoder interface and its families."""
