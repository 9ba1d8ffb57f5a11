"""The Typer app: a file per command group."""
