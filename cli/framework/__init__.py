"""The declaration, manual, output and errors of commands; no command is in it."""
