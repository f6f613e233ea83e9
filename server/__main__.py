"""``python -m server`` is the ``headlong`` command."""

from server.cli.main import main

if __name__ == "__main__":
    main()
