"""Data folders that lie elsewhere: behind a web server, in an object store, at the end of a command."""
