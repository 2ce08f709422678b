"""The modes that encode each image once."""
