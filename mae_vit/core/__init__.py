"""What every part uses and what uses no part."""

__version__ = "0.1.0"
