"""The command `mae-vit`: one file a command."""
