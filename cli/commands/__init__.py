"""The commands: one module or package per top-level command, named as the command."""
