"""What the tables and figures of README and docs are made of; `docs/tools/tables.py` puts them into the pages."""
