"""``python -m dep2p``: the command."""

from dep2p.cli.main import main

if __name__ == "__main__":
    main()
