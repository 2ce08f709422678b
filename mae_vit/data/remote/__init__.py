"""Remote data folders: on a web server or in an object store."""
